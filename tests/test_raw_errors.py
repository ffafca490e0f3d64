"""A wrong value in a declaration is refused in words: a :class:`CuesError`, never an error of Python.

Each parameter of each declaration gets each of some strange values, the others being right.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from test_processors_docs import declared, loaded

import cues
from cues import CuesError
from cues.checkpoints import JSONFileCheckpoint, SQLCheckpoint
from cues.graphs.options import OPTION_NAMES
from cues.processors import files, http, joins, link, reducers, shape, windows
from cues.processors.aggregates import aggregate
from cues.processors.databases import DuckDB
from cues.processors.delta import DeltaTarget
from cues.processors.delta_source import DeltaSource
from cues.processors.event_stream import EventStream
from cues.processors.event_time import KeyOf, watermark
from cues.processors.file_sink import FileSink
from cues.processors.file_source import Files
from cues.processors.http_sink import Requests
from cues.processors.http_source import Poll
from cues.processors.iceberg import IcebergTarget
from cues.processors.kafka_sink import Topic
from cues.processors.kafka_source import Records
from cues.processors.kinesis import KinesisSender, KinesisStream
from cues.processors.mqtt import Mqtt, Publisher
from cues.processors.mysql_changes import Changes as MySQLChanges
from cues.processors.nats_streams import NatsStream, NatsSubject
from cues.processors.postgres_changes import Changes
from cues.processors.rabbitmq import RabbitPublisher, RabbitQueue
from cues.processors.redis_streams import RedisStream, RedisTarget
from cues.processors.reducers import count
from cues.processors.sql import SQLite
from cues.processors.sql_sink import Table
from cues.processors.sql_source import Rows
from cues.processors.sqs import Sender, Sqs
from cues.processors.webhook import Webhook
from cues.processors.websocket import WebSocket

INF = float("inf")
STRANGE: list[Any] = [
    5, -1, 1.5, 10**400, INF, -INF, float("nan"), True, None, "", "no", "9999999999999d", "\ud800", b"x", [], [[]], [5],
    (), {}, {"a": 5}, {5: "a"}, {"a": []}, object(), object, timedelta(days=-1), timedelta.max, Exception,
]  # fmt: skip


def function(message: Any) -> Any:
    return message


EVENT_TIME: dict[str, Any] = {"time": "t", "late": "late", "key": "k", "delay": 0, "idle": "1m", "id": "x"}
EARLY: dict[str, Any] = {"early": "1s"}
WINDOW = {**EVENT_TIME, "inputs": "a", "output": "out", "reduce": {"n": count()}}
WITHOUT_LATE = {name: value for name, value in WINDOW.items() if name != "late"}
JOIN = {**EVENT_TIME, "inputs": {"l": "a", "r": "b"}, "output": "out", "how": "left", "combine": None}

ALL_HTTP: dict[str, Any] = {"timeout_s": 5, "retry_on": (500,), "retry_after_s_max": 5, "client": None, "headers": None}
HTTP: dict[str, Any] = {**ALL_HTTP, "redirects": 1, "body_bytes_max": 5}

DECLARATIONS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "AnyOf": (cues.AnyOf, {"a": "a"}),
    "AnyOf()": (lambda queue: cues.AnyOf(queue), {"queue": "a"}),
    "AllOf": (cues.AllOf, {"a": "a"}),
    "Retry": (cues.Retry, {"attempts": 1, "backoff_s": 1, "max_s": 1, "on": Exception, "jitter": 0}),
    "Retention": (cues.Retention, {"count": 1, "age": 1, "bytes": 1, "read": True}),
    "Source": (cues.Source, {"id": "a", "fn": lambda position: None}),
    "Stream": (cues.Stream, {"fn": function, "inputs": "a", "outputs": "b"}),
    "Sink": (cues.Sink, {"fn": function, "inputs": "a"}),
    "broadcast": (cues.broadcast, {"inputs": "a", "outputs": ["b"]}),
    "Graph": (cues.Graph, {"id": "g", "processors": [], "errors": None, "strategy": "exactly-once", "queues": None}),
    "every": (cues.every, {"interval": 1, "missed": "all", "follow": True}),
    "cron": (cues.cron, {"expression": "* * * * *", "timezone": "UTC", "missed": "all"}),
    "KeyOf": (KeyOf, {"key": "k"}),
    "watermark": (watermark, {"until": 5}),
    "tumbling": (windows.tumbling, {**WINDOW, **EARLY, "size": "1m", "offset": 0}),
    "hopping": (windows.hopping, {**WINDOW, **EARLY, "size": "1m", "every": "10s", "offset": 0}),
    "sessions": (windows.sessions, {**WINDOW, **EARLY, "gap": "1m"}),
    "counted": (windows.counted, {**WITHOUT_LATE, **EARLY, "count": 2, "every": 2, "within": "1m"}),
    "aggregate": (aggregate, {**{k: v for k, v in WITHOUT_LATE.items() if k != "key"}, **EARLY, "by": "k", "every": 5}),
    "interval": (joins.interval, {**JOIN, "before": 0, "after": 0}),
    "as_of": (joins.as_of, {**JOIN, "tolerance": "1m"}),
    "lookup": (
        joins.lookup,
        {**{k: JOIN[k] for k in ("inputs", "output", "key", "how", "combine", "id")}, "delete": None},
    ),
    "latest": (
        joins.latest,
        {**{k: JOIN[k] for k in ("inputs", "output", "key", "combine", "id")}, "how": "full", "emit": "change"}
        | {"delete": None},
    ),
    "dedupe": (shape.dedupe, {"key": "k", "within": "1d", "time": "t"}),
    "debounce": (
        shape.debounce,
        {"input": "a", "output": "b", "key": "k", "quiet": 1, "longest": 2, "count": "n", "id": None},
    ),
    "flat_map": (shape.flat_map, {"of": "items"}),
    "split": (shape.split, {"branches": {"a": function}, "other": "b", "big": function}),
    "enrich": (shape.enrich, {"key": "k", "into": "v", "fetch": function, "ttl": "1h", "capacity": 5}),
    "sample": (shape.sample, {"share": 0.5, "by": "k"}),
    "merge": (lambda time, a, most: shape.merge(time, a, "b", most=most), {"time": "t", "a": "a", "most": 5}),
    **{name: (getattr(reducers, name), {"field": "v"}) for name in ("count", "sum", "mean", "min", "max")},
    "quantiles": (reducers.quantiles, {"field": "v", "at": (0.5,), "exact": 5}),
    "distinct": (reducers.distinct, {"field": "v", "exact": 5}),
    "top": (reducers.top, {"field": "v", "k": 5, "capacity": 50}),
    "Rate": (http.Rate, {"rate": "10/s"}),
    "Signature": (http.Signature, {"secret": "s", "form": "github", "header": "X", "tolerance_s": 5}),
    "Requests": (
        Requests,
        {"url": "http://a", "method": "GET", **HTTP, "accept": (409,), "attempts": 2, "rate": 5, "json": function}
        | {"key": "k", "key_header": "K", "sign": None, "answer": None},
    ),
    "Requests, body": (Requests, {"url": "http://a", "body": function}),
    "Poll": (
        Poll,
        {"url": "http://a", "items": "a", "id": "b", "interval_s": 5, "remember": 5, "reserved": (), **HTTP},
    ),
    "Poll, pages": (Poll, {"url": "http://a", "items": "a", "next": "n"}),
    "Poll, cursor": (Poll, {"url": "http://a", "cursor": "c", "params": function, "json": function, **HTTP}),
    "OAuth": (
        http.OAuth,
        {"url": "http://a", "client_id": "a", "client_secret": "s", "refresh_token": "r", "keep": "f", "scope": "s"}
        | {"form": {"a": "b"}, "headers": {"a": "b"}, "timeout_s": 5},
    ),
    "WebSocket": (
        WebSocket,
        {"url": "ws://a", "first": (), "id": "a", "data": "json", "shape": "value", "ends": False, "headers": None}
        | {"protocols": (), "retry_s": 1, "ping_s": 1, "timeout_s": 5, "message_bytes_max": 5, "retry_on": (500,)}
        | {"retry_after_s_max": 5, "reserved": ()},
    ),
    "EventStream": (
        EventStream,
        {"url": "http://a", "data": "json", "shape": "value", "events": None, "retry_s": 5, "idle_s": 5}
        | {"event_bytes_max": 5, "reserved": (), **ALL_HTTP},
    ),
    "Receiver": (
        link.Receiver,
        {"port": 5, "path": "/", "host": "127.0.0.1", "token": "t" * 16, "cert": None, "key": None, "client_ca": None}
        | {"body_bytes_max": 5_000, "body_s": 5, "answer_s": 5},
    ),
    "link.Sender": (
        link.Sender,
        {"url": "https://a:5/b", "token": "t" * 16, "name": "n", "ca": None, "cert": None, "key": None, "timeout_s": 5},
    ),
    "Webhook": (
        Webhook,
        {"port": 8080, "path": "/", "methods": ("POST",), "remember": 5, "pending_max": 5, "body_bytes_max": 5}
        | {"body_s": 5, "answer_s": 5, "reserved": (), "id": "a", "verify": None, "host": "127.0.0.1"}
        | {"message": function, "reply": None},
    ),
    "QueueOptions": (
        cues.QueueOptions,
        {"partitions": 2, "key": "k", "partitioner": None, "max_lag": 5, "max_bytes": 500, "retention": "10d"}
        | {"metadata": True, "max_message_bytes": 5000, "path": None, "schema": None},
    ),
    "Files": (
        Files,
        {"pattern": "*.jsonl", "format": "jsonl", "order": "name", "watch": False, "follow": False, "bad": "error"}
        | {"encoding": "utf-8", "delimiter": ",", "record_lines_max": 5, "line_bytes_max": 500, "at": None}
        | {"reserved": (), "rotated": None, "poll_s": 0.2, "idle_exit_s": None, "grace_s": 1.0}
        | {"settle_s": 0.0, "after": "keep", "columns": None},
    ),
    "Files csv": (
        Files,
        {"pattern": "*.csv", "schema": {"a": "int64"}, "header": ["a"], "quote": '"', "escape": None, "begins": None},
    ),
    "Files xlsx": (Files, {"pattern": "*.xlsx", "sheet": None}),
    "Rows": (
        Rows,
        {"target": "a.db", "table": "t", "cursor": "id", "columns": None, "follow": False, "poll_s": 1.0, "lag_s": 0.0}
        | {"page_rows": 5, "changes": "refuse", "reserved": ()},
    ),
    "FileSink": (
        FileSink,
        {"path": "out", "format": "csv", "roll_bytes": 5, "roll_s": None, "durability": "disk", "compression": None}
        | {"columns": None, "schema": None, "delimiter": ",", "timeout_s": 5}
        | {"partition_by": None, "open_files_max": 5, "at_end": "keep"},
    ),
    "FileSink parquet": (lambda schema: FileSink("out", "parquet", schema=schema), {"schema": None}),
    "Table": (
        Table,
        {"target": "a.db", "table": "t", "columns": {"a": "text"}, "mode": "upsert", "key": "a", "delete": None},
    ),
    "SQLCheckpoint": (SQLCheckpoint, {"target": "a.db", "name": "n", "schema": "", "timeout_s": 5}),
    "JSONFileCheckpoint": (JSONFileCheckpoint, {"path": "a.json", "timeout_s": 5}),
    "SQLite": (SQLite, {"path": "a.db", "schema": "", "timeout_s": 5}),
    "DuckDB": (DuckDB, {"path": "a.duckdb", "schema": "", "timeout_s": 5}),
    "Records": (
        Records,
        {"servers": "s:1", "topic": "t", "value": "bytes", "key": "bytes", "shape": "record", "follow": False}
        | {"start": "earliest", "on_gap": "raise", "discover_s": 5, "timeout_s": 5, "config": None, "reserved": ()},
    ),
    "Topic": (
        Topic,
        {"servers": "s:1", "topic": "t", "shape": "value", "key": "k", "partition": "key", "timeout_s": 5}
        | {"transaction_timeout_s": 5, "prefix": "cues", "config": None},
    ),
    "Mqtt": (
        Mqtt,
        {"url": "mqtt://h", "topics": "t", "payload": "bytes", "shape": "record", "retained": True, "in_flight": 5}
        | {"session_s": 5, "idle_exit_s": 5, "user": "u", "password": "p", "version": "5", "client": "c"}
        | {"keepalive_s": 5, "timeout_s": 5, "reserved": (), "tls": None},
    ),
    "Publisher": (
        Publisher,
        {"url": "mqtt://h", "topic": "t", "shape": "value", "retain": False, "in_flight": 5, "user": "u"}
        | {"password": "p", "version": "5", "client": "c", "keepalive_s": 5, "timeout_s": 5, "tls": None},
    ),
    "RabbitQueue": (
        RabbitQueue,
        {"url": "amqp://h", "queue": "q", "declare": None, "bindings": (), "body": "bytes", "shape": "record"}
        | {"identity": "content", "exclusive": True, "in_flight": 5, "idle_exit_s": 5, "user": "u", "password": "p"}
        | {"heartbeat_s": 5, "timeout_s": 5, "reserved": (), "tls": None},
    ),
    "RabbitPublisher": (
        RabbitPublisher,
        {"url": "amqp://h", "exchange": "e", "routing_key": "k", "shape": "value", "mandatory": True, "in_flight": 5}
        | {"user": "u", "password": "p", "heartbeat_s": 5, "timeout_s": 5, "tls": None},
    ),
    "Sqs": (
        Sqs,
        {"url": "https://h/q", "body": "json", "shape": "value", "visibility_s": 5, "wait_s": 5, "in_flight": 5}
        | {"idle_exit_s": 5, "reserved": (), "client": None},
    ),
    "Sender": (Sender, {"url": "https://h/q.fifo", "shape": "value", "group": "g", "client": None}),
    "KinesisStream": (
        KinesisStream,
        {"stream": "s", "data": "json", "shape": "value", "follow": True, "start": "latest", "on_gap": "fail"}
        | {"poll_s": 5, "timeout_s": 5, "endpoint_url": "http://h", "region": "r", "reserved": (), "client": None},
    ),
    "KinesisSender": (
        KinesisSender,
        {"stream": "s", "shape": "value", "key": "k", "id": "id", "order": "key", "timeout_s": 5}
        | {"endpoint_url": "http://h", "region": "r", "client": None},
    ),
    "RedisStream": (
        RedisStream,
        {"url": "redis://h", "stream": "s", "fields": "text", "field": None, "follow": False, "start": "oldest"}
        | {"on_gap": "raise", "timeout_s": 5, "config": None, "reserved": ()},
    ),
    "RedisTarget": (
        RedisTarget,
        {"url": "redis://h", "stream": "s", "fields": "text", "field": None, "maxlen": 5, "prefix": "cues"}
        | {"timeout_s": 5, "config": None},
    ),
    "DeltaTarget": (
        DeltaTarget,
        {"where": "t", "schema": None, "mode": "append", "key": (), "partition_by": (), "evolve": False}
        | {"storage_options": None},
    ),
    "IcebergTarget": (
        IcebergTarget,
        {"table": "a.t", "catalog": "c", "schema": None, "mode": "append", "key": (), "partition_by": ()}
        | {"evolve": False, "properties": None},
    ),
    "DeltaSource": (
        DeltaSource,
        {"where": "t", "begin": None, "snapshot": True, "changes": "refuse", "columns": None, "follow": False}
        | {"poll_s": 5, "batch_rows": 5, "storage_options": None, "reserved": ()},
    ),
    "NatsStream": (
        NatsStream,
        {"servers": "nats://h", "stream": "s", "data": "json", "shape": "value", "follow": False, "start": "oldest"}
        | {"on_gap": "raise", "timeout_s": 5, "config": None, "reserved": ()},
    ),
    "Changes": (
        Changes,
        {"url": "postgresql://h/d", "tables": "t", "slot": "cues", "publication": None, "snapshot": True}
        | {"follow": False, "warn_bytes": 5, "timeout_s": 5},
    ),
    "MySQLChanges": (
        MySQLChanges,
        {"url": "mysql://h/d", "tables": "t", "server_id": None, "snapshot": True, "follow": False, "timeout_s": 5},
    ),
    "NatsSubject": (
        NatsSubject,
        {"servers": "nats://h", "stream": "s", "subject": "a.b", "shape": "value", "timeout_s": 5, "config": None},
    ),
    "read_jsonl": (
        lambda path, **options: files.read_jsonl(path, **options),
        {"path": "*.jsonl", "position": None, "encoding": "utf-8", "line_bytes_max": 5, "at": None, "reserved": ()},
    ),
    "read_csv": (
        lambda path, **options: files.read_csv(path, **options),
        {"path": "*.csv", "position": None, "delimiter": ",", "header": None, "quote": '"', "escape": None, "at": None}
        | {"encoding": "utf-8", "record_lines_max": 5, "line_bytes_max": 5, "reserved": ()},
    ),
    "reducer": (reducers.reducer, {"start": dict, "add": function, "merge": function, "result": function}),
}
OPTIONS = {"Source": {"id"}, "Stream": set[str](), "Sink": set[str]()}


ANYTHING: dict[str, set[str]] = {
    "Retention": {"read"}, "every": {"follow"}, "Files": {"watch", "at"}, "Rows": {"target", "follow"},
    "Records": {"follow"}, "lookup": {"delete"}, "read_jsonl": {"path", "position", "at"},
    "read_csv": {"path", "position", "at"}, "Source": {"opts"}, "Stream": {"opts"}, "Sink": {"opts"},
    "Requests": {"method", "client", "json", "key", "key_header", "sign", "answer"}, "Requests, body": {"body"},
    "Poll": {"items", "id", "client"}, "Poll, pages": {"items", "next"}, "Poll, cursor": {"cursor", "json", "client"},
    "EventStream": {"client"}, "Mqtt": {"retained"},
}  # fmt: skip
"""Parameters that refuse none of the strange values: they mean any value, or a wrong one fails in the run only."""


def cases() -> list[Any]:
    own: list[Any] = [(name, parameter) for name, (_, given) in DECLARATIONS.items() for parameter in given]
    return own + [(name, option) for name, taken in OPTIONS.items() for option in OPTION_NAMES if option not in taken]


def parameters_of(kind: Any) -> set[str]:
    """The parameters of a processor that have a name; the options of the graph, which ``**options`` takes, are not."""
    several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return {name for name, parameter in inspect.signature(kind).parameters.items() if parameter.kind not in several}


def test_every_parameter_of_every_ready_made_processor_is_in_the_table() -> None:
    """A new entry point, or a new parameter of one, is to be declared here. :mod:`test_secrets` has it then, too."""
    missing = {}
    for point, place in declared().items():
        kind = loaded(place)
        given = [set(given) for name, (make, given) in DECLARATIONS.items() if kind is make or name == kind.__name__]
        assert given, f"{point} is not in DECLARATIONS"
        missing[point] = sorted(parameters_of(kind).difference(*given))
    assert {point: names for point, names in missing.items() if names} == {}


@pytest.mark.parametrize(("name", "parameter"), cases())
def test_a_strange_value_is_refused_in_words(name: str, parameter: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    make, given = DECLARATIONS[name]
    make(**given)
    raw, refused = [], 0
    for value in STRANGE:
        try:
            made = make(**{**given, parameter: value})
            if isinstance(made, (cues.Source, cues.Stream, cues.Sink)):
                cues.Graph("g", [made]).plan()
        except CuesError:
            refused += 1
        except Exception as error:
            raw.append(f"{parameter}={value!r:.60}: {type(error).__name__}: {error!s:.100}")
    assert not raw
    assert (refused == 0) is (parameter in ANYTHING.get(name, ())), f"{refused} of {len(STRANGE)} values are refused"


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"attempts": 0}, r"Retry\(attempts=0\)"),
        ({"attempts": 1.5}, r"Retry\(attempts=1.5\)"),
        ({"on": [ConnectionError]}, r"Retry\(on=\[.*a tuple of them"),
        ({"on": (ConnectionError, "TimeoutError")}, r"Retry\(on="),
        ({"backoff_s": "1s"}, r"Retry\(backoff_s='1s'\)"),
        ({"max_s": None}, r"Retry\(max_s=None\)"),
        ({"jitter": 2}, r"Retry\(jitter=2\)"),
    ],
)
def test_a_retry_is_checked_field_by_field_when_it_is_made(given: dict[str, Any], text: str) -> None:
    with pytest.raises(cues.errors.InvalidArgument, match=text):
        cues.Retry(**given)


@pytest.mark.parametrize(
    ("value", "seconds"),
    [("250ms", 0.25), ("90s", 90), ("1.5h", 5400), ("2w", 1_209_600), (5, 5), (0.5, 0.5), (timedelta(minutes=1), 60)],
)
def test_a_duration_is_read_in_one_way_everywhere(value: Any, seconds: float) -> None:
    assert cues.duration_of(value, "x") == seconds
    cues.Source("a", cues.every(value))
    assert cues.Stream(function, "a", "b", ttl=value).options.ttl == value
    windows.tumbling(**{**WINDOW, "size": value, "idle": value, "delay": value})
    shape.dedupe("k", within=value)
    assert cues.delayed({"n": 1}, delay=value)


def test_a_duration_has_bounds() -> None:
    assert cues.duration_of(0, "x", zero=True) == 0
    for value in (0, -1, 10**400, float("inf"), float("nan"), "9999999999999d", "5", "5 parsecs", timedelta.max, None):
        with pytest.raises(cues.errors.InvalidArgument, match=r"x is .*not a duration above 0.*Try: "):
            cues.duration_of(value, "x")
