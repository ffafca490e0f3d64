"""What strangers may not set: every ready-made source × every reserved key, refused or allowed by name."""

from __future__ import annotations

import contextlib
import json
import sqlite3
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from http_servers import Reply, serving
from test_processors_docs import declared, loaded

import cues
from cues import processors, testing
from cues.errors import CuesError, InvalidArgument
from cues.processors import files, foreign
from cues.processors.delta_source import DeltaSource
from cues.processors.event_time import WATERMARK
from cues.processors.file_source import Files
from cues.processors.http_source import Poll
from cues.processors.kafka_source import Records
from cues.processors.nats_streams import NatsStream
from cues.processors.redis_streams import RedisStream
from cues.processors.sql_source import Rows
from cues.processors.webhook import Webhook
from cues.processors.websocket import WebSocket

if TYPE_CHECKING:
    from kafka_broker import Broker
    from nats_server import NatsServer
    from redis_server import RedisServer

Row = dict[str, str]


def text_of(row: Row, format: str) -> str:
    return ",".join(row) + "\n" + ",".join(row.values()) + "\n" if format == "csv" else json.dumps(row) + "\n"


def of_files(format: str) -> Callable[[Row, Path, list[str]], Any]:
    def read(row: Row, path: Path, reserved: list[str]) -> Any:
        name = path / f"rows.{format}"
        if format in ("csv", "jsonl"):
            name.write_text(text_of(row, format))
        else:
            pa = pytest.importorskip("pyarrow")
            table = pa.Table.from_pylist([row])
            if format == "parquet":
                __import__("pyarrow.parquet").parquet.write_table(table, name)
            else:
                with pa.ipc.new_file(name, table.schema) as writer:
                    writer.write_table(table)
        return through(Files(name, reserved=reserved), path)

    return read


def of_function(format: str, read: Any) -> Callable[[Row, Path, list[str]], Any]:
    def pull(row: Row, path: Path, reserved: list[str]) -> Any:
        name = path / f"rows.{format}"
        name.write_text(text_of(row, format))
        return through(lambda position: read(name, position=position, reserved=reserved), path)

    return pull


def of_rows(row: Row, path: Path, reserved: list[str]) -> Any:
    pytest.importorskip("sqlalchemy")
    with contextlib.closing(sqlite3.connect(path / "rows.db")) as connection, connection:
        columns = ", ".join(f'"{name}" text' for name in row)
        connection.execute(f"create table rows (id integer primary key, {columns})")
        marks = ", ".join("?" * len(row))
        connection.execute(f"insert into rows values (1, {marks})", list(row.values()))
    return through(Rows(f"sqlite:///{path}/rows.db", "rows", "id", columns=list(row), reserved=reserved), path)


def of_delta(row: Row, path: Path, reserved: list[str]) -> Any:
    deltalake = pytest.importorskip("deltalake")
    deltalake.write_deltalake(path / "table", pytest.importorskip("pyarrow").Table.from_pylist([row]))
    return through(DeltaSource(path / "table", reserved=reserved), path)


def of_poll(row: Row, path: Path, reserved: list[str]) -> Any:
    pytest.importorskip("httpx")
    with serving(lambda seen: Reply(200, json.dumps([row]).encode())) as server:
        return through(Poll(server.url, interval_s=None, reserved=reserved), path)


def of_websocket(row: Row, path: Path, reserved: list[str]) -> Any:
    server = pytest.importorskip("websockets.sync.server")
    with server.serve(lambda socket: socket.send(json.dumps(row)), "127.0.0.1", 0) as serving:
        threading.Thread(target=serving.serve_forever, daemon=True).start()
        url = f"ws://127.0.0.1:{serving.socket.getsockname()[1]}"
        return through(WebSocket(url, ends=True, reserved=reserved), path)


def of_webhook(row: Row, path: Path, reserved: list[str]) -> Any:
    """The answer says whether it is refused; what follows is still read."""
    httpx = pytest.importorskip("httpx")
    pytest.importorskip("uvicorn")
    hook = Webhook(port=0, reserved=reserved)
    graph = cues.Graph("g", [cues.Source("events", hook)], durability="process")
    with graph.start(store=path / "hooks") as running:
        limit = time.monotonic() + 60
        while hook.url is None:
            assert time.monotonic() < limit
            time.sleep(0.005)
        answer = httpx.post(hook.url, json=row)
        assert httpx.post(hook.url, json={"good": 1}).status_code == 200
        found: list[Any] = running.messages("events")
    assert found[-1] == {"good": 1}
    assert answer.status_code in (200, 400) and len(found) == (2 if answer.status_code == 200 else 1)
    return found[0] if len(found) == 2 else Refused(answer.json()["error"])


class Refused(str):
    """The text of the refusal."""


def through(source: Any, path: Path) -> Any:
    """The only message of a source in a run, or the text for which it, or the source, was refused."""
    graph = cues.Graph("g", [cues.Source("events", source)], errors="errors")
    with cues.open(path / "store", durability="process") as store:
        try:
            testing.run_until_idle(graph, store)
        except CuesError as error:
            return Refused(error)
        errors = testing.messages(store, "errors")
        if errors:
            assert not testing.messages(store, "events")
            return Refused(errors[0]["err/cause"][0]["message"])
        (message,) = testing.messages(store, "events")
        # The simple readers say by a row of their own which line is malformed.
        return Refused(message["problem"]) if message.get("q/type") == files.MALFORMED else message


SOURCES: dict[str, Callable[[Row, Path, list[str]], Any]] = {
    **{f"files {format}": of_files(format) for format in ("csv", "jsonl", "parquet", "arrow")},
    "read-csv": of_function("csv", files.read_csv),
    "read-jsonl": of_function("jsonl", files.read_jsonl),
    "sql-rows": of_rows,
    "delta-source": of_delta,
    "http-poll": of_poll,
    "websocket": of_websocket,
    "webhook": of_webhook,
}
NEVER: list[Row] = [{"q/uuid": "0"}, {"q/meta": "0"}, {"q/deliver-at": "0"}, {"q/hash": "0"}, {"q/new": "0"}]
UNLESS_ALLOWED: list[Row] = [
    {"q/type": WATERMARK},
    {"q/type": "q.type.err/processor"},
    {"q/type": files.MALFORMED, "problem": "none"},
    {"q/topics": "a"},
]


def test_every_ready_made_source_is_in_the_table() -> None:
    points = declared()
    sources = {name for name in points if processors.facts_of(loaded(points[name]))["Kind"] == "source"}
    assert sources == {name.partition(" ")[0] for name in SOURCES} | {
        "kafka-records",
        "redis-stream",
        "nats-stream",
        "mqtt",
        "rabbitmq",  # test_processors_rabbitmq.py
        "sqs",
        "kinesis-stream",  # test_processors_kinesis.py
        "event-stream",  # test_event_stream.py
        "mysql-changes",
        "postgres-changes",  # a row is a field of the message, so its columns set no key of the message
        "link-receiver",  # test_link.py: what is reserved there is less
    }


@pytest.mark.parametrize("row", [*NEVER, *UNLESS_ALLOWED], ids=str)
@pytest.mark.parametrize("source", SOURCES)
def test_a_stranger_sets_nothing_that_is_reserved(source: str, row: Row, tmp_path: Path) -> None:
    found = SOURCES[source]({"n": "1", **row}, tmp_path, [])
    assert isinstance(found, Refused) and "reserved" in found


@pytest.mark.parametrize("row", UNLESS_ALLOWED[:2], ids=str)
@pytest.mark.parametrize("source", SOURCES)
def test_a_type_is_taken_where_the_graph_asks_for_it(source: str, row: Row, tmp_path: Path) -> None:
    found = SOURCES[source]({"n": "1", **row}, tmp_path, ["q/type"])
    assert found == {"n": "1", **row}


@pytest.mark.parametrize("source", SOURCES)
def test_an_own_type_of_the_graph_is_data(source: str, tmp_path: Path) -> None:
    assert SOURCES[source]({"n": "1", "q/type": "order/paid"}, tmp_path, [])["q/type"] == "order/paid"


@pytest.mark.slow
@pytest.mark.parametrize("row", [*NEVER, *UNLESS_ALLOWED, {"q/type": "order/paid"}], ids=str)
def test_a_record_of_kafka(row: Row, kafka: Broker, tmp_path: Path) -> None:
    from confluent_kafka import Producer

    topic = kafka.topic()
    producer = Producer({"bootstrap.servers": kafka.servers})
    producer.produce(topic, json.dumps(row).encode())
    producer.flush(30)
    found = through(Records(kafka.servers, topic, value="json", shape="value"), tmp_path)
    if row == {"q/type": "order/paid"}:
        assert found["q/type"] == "order/paid"
    else:
        assert isinstance(found, Refused) and "reserved" in found


@pytest.mark.parametrize("row", [*NEVER, *UNLESS_ALLOWED], ids=str)
def test_an_entry_of_redis(row: Row, redis: RedisServer, tmp_path: Path) -> None:
    stream = redis.stream()
    redis.add(stream, {"n": "1", **row})
    found = through(RedisStream(redis.url, stream), tmp_path)
    assert isinstance(found, Refused) and "reserved" in found
    if row in UNLESS_ALLOWED[:2]:
        (_, message), *_ = RedisStream(redis.url, stream, reserved=["q/type"])(None)
        assert {**message, **row} == message


@pytest.mark.parametrize("row", [*NEVER, *UNLESS_ALLOWED], ids=str)
def test_a_message_of_nats(row: Row, nats: NatsServer, tmp_path: Path) -> None:
    stream = nats.stream()
    nats.publish(f"{stream}.a", json.dumps({"n": "1", **row}).encode())
    found = through(NatsStream(nats.url, stream, data="json", shape="value"), tmp_path)
    assert isinstance(found, Refused) and "reserved" in found
    if row in UNLESS_ALLOWED[:2]:
        source = NatsStream(nats.url, stream, data="json", shape="value", reserved=["q/type"])
        ((_, message),) = source(None)
        assert {**message, **row} == message


@pytest.mark.parametrize("wrong", ["q/type", ["q/uuid"], ["other"]])
def test_what_may_be_allowed(wrong: Any) -> None:
    with pytest.raises(InvalidArgument, match="reserved="):
        foreign.allowed(wrong)


def test_a_source_may_ask_whether_its_message_can_be_written(tmp_path: Path) -> None:
    refused = []

    def numbers(position: int | None, process: cues.Process) -> Any:
        for number, message in enumerate([{"k": "a"}, {"n": 1}, {"k": "\ud800"}, {"k": "x" * 2_000}], position or 1):
            try:
                process.check(message)
                yield number, message
            except CuesError as error:
                refused.append(type(error).__name__)

    options = cues.QueueOptions(partitions=2, key="k", max_message_bytes=1_000)
    graph = cues.Graph("g", [cues.Source("events", numbers)], queues={"events": options})
    with cues.open(tmp_path / "store", durability="process") as store:
        testing.run_until_idle(graph, store)
        assert testing.messages(store, "events") == [{"k": "a"}]
    assert refused == ["InvalidArgument", "CodecError", "MessageTooLarge"]


def test_a_stream_has_nothing_to_check(tmp_path: Path) -> None:
    def checked(message: dict[str, Any], process: cues.Process) -> Any:
        process.check(message)

    graph = cues.Graph("g", errors="errors")
    graph.source("events")
    graph.stream("events", "out")(checked)
    with cues.open(tmp_path / "store", durability="process") as store:
        store.queue("events").appender().write({"n": 1})
        testing.run_until_idle(graph, store)
        (error,) = testing.messages(store, "errors")
    assert "is not a source" in error["err/cause"][0]["message"]
