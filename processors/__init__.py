"""Ready-made sources, sinks, windows and joins: files, databases, lake tables, HTTP and brokers such as Kafka.

Installed as ``cues.processors``. The modules use only public names of :mod:`cues`. A module that needs another package
says so, and loads it on first use.

    files.py         sources that read CSV and JSON lines, and continue at the committed position
    file_source.py   sources over globs, watched directories and followed logs, in every format
    file_sink.py     files of lines, CSV, Parquet or Arrow as targets of sinks, exactly once
    shape.py         streams: dedupe, flat map, split, sample, merge
    sql.py           transactions of sinks in SQLite, which take every message exactly once
    sql_source.py    rows of tables in SQLite, PostgreSQL and DuckDB, incrementally
    sql_sink.py      tables as targets of sinks: append, upsert, delete
    delta.py         Delta tables as targets of sinks, exactly once; delta_source.py has their versions as messages
    iceberg.py       Iceberg tables as targets of sinks, exactly once; lake.py is the base of both targets
    kafka_source.py  records of a Kafka topic
    kafka_sink.py    Kafka topics as targets of sinks, exactly once; kafka.py is what both use
    redis_streams.py the entries of a Redis stream, and Redis as the target of sinks, exactly once
    mqtt.py          the messages of MQTT topics, acknowledged after the commit, and a publisher: names of
                     mqtt_source.py, mqtt_sink.py and mqtt_client.py, which is what both use
    rabbitmq.py      the messages of a queue of RabbitMQ, acknowledged after the commit, and a publisher: names of
                     rabbitmq_source.py, rabbitmq_sink.py and rabbitmq_client.py
    nats_streams.py  the messages of a NATS stream, and a subject as the target of sinks, exactly once: names of
                     nats_source.py, nats_sink.py and nats_client.py
    sqs.py           the messages of an Amazon SQS queue, deleted after the commit, and a sender
    kinesis.py       the records of an Amazon Kinesis stream, exactly once, and a sender: names of kinesis_source.py and
                     kinesis_sink.py; kpl.py has aggregated records, aws.py what it shares with sqs.py
    http_sink.py     a request for each message; http.py has answers, failures, rates and signatures
    http_source.py   the items of a resource that is asked again and again
    event_stream.py  the events that a server sends (Server-Sent Events)
    websocket.py     the messages that a server sends over a WebSocket
    webhook.py       a server whose requests become messages
    link.py          a queue continued on another machine, exactly once
    source_server.py the server of a source; serving.py has the guards of servers that strangers reach
    foreign.py       the reserved keys that messages from outside may not set
    checks.py        checks of options and positions that several of these modules make
    acknowledged.py  the base of sources that acknowledge after the commit
    databases.py, waits.py   the databases in one form; waits of sources
    windows.py       streams that reduce messages in windows of event time; reducers.py has what they compute
    aggregates.py    totals of all messages of a key
    joins.py         streams that join two queues by key and time
    event_time.py    watermarks and late messages, the base of windows and joins
    vectors.py       columns of tables as arrays, for processors that take tables without making messages
    columns.py       the types of the columns of tables in files; sql_values.py: of values in those of databases
    column_texts.py  columns as texts: those of files of CSV and JSON lines
    formats.py, places.py    the formats of files, and where they are: on this machine or in an object store

Processors are found by the entry points of the group ``cues.processors``, ours and those of other distributions alike
(:func:`available`). The docstring of each has the lines *Kind*, *Needs*, *Guarantee* and *Mechanism*
(:func:`facts_of`), from which docs/processors.md is made.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, TypeVar

from cues.graphs.options import ready_made

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUP: Final = "cues.processors"
"""The group of entry points."""

ANY: Final = ready_made("all")
READING: Final = ANY | ready_made("reading")
SOURCE: Final = ANY | ready_made("source")
STREAM: Final = READING | ready_made("stream")
FREE: Final = STREAM | ready_made("free")
SINK: Final = READING | ready_made("sink") | {"batch": bool}
PUBLISHER: Final = {name: need for name, need in SINK.items() if name != "checkpoint"}
"""The options that ready-made processors take: all; those that read; sources; streams with state, and without; sinks
with a target, and without.

A processor has them in its attribute ``takes``: the names, each with the value that the processor needs, or ``...``. A
declaration refuses all others, because an option that a function does not know changes its results in silence.
"""
T = TypeVar("T")

FACTS: Final = ("Kind", "Needs", "Guarantee", "Mechanism")


def available() -> dict[str, EntryPoint]:
    """Return the entry points of all installed processors, sorted by name; ``.load()`` imports one."""
    from importlib.metadata import entry_points  # it loads the package email, and takes as long as a start of Cues

    return {point.name: point for point in sorted(entry_points(group=GROUP), key=lambda point: point.name)}


def takes(options: Mapping[str, Any]) -> Callable[[T], T]:
    """Give a function, or a class of functions, the options that it takes."""

    def given(function: T) -> T:
        function.takes = options  # type: ignore[attr-defined]
        return function

    return given


def facts_of(processor: Any) -> dict[str, str]:
    """Return the lines *Kind*, *Needs*, *Guarantee* and *Mechanism* of a processor's docstring, empty if missing."""
    text = inspect.getdoc(processor) or ""
    found = {name: re.search(rf"^{name}: (.+)$", text, re.M) for name in FACTS}
    return {name: match[1] if match else "" for name, match in found.items()}
