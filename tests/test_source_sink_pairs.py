"""Every declared source with every declared sink: each record of the source is in the target once.

The pairs are made from the entry points of this distribution, so a new processor is in them by being declared. Sources
and sinks that keep their position are those of the contracts, with their servers. The others, which can repeat a
message or need a server of their own, are skipped by name; each has a file of tests of its own.
"""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import contracts_sinks
import contracts_sources
import pytest
from http_servers import serving
from sets import slow_except
from test_processors_docs import declared, loaded

import cues
from cues import processors, testing

SOURCES = {
    "files": ("jsonl", "jsonl-gzip", "csv", "text", "parquet", "json", "avro", "arrow", "last-grows", "tail"),
    "read-csv": ("read-csv",),
    "read-jsonl": ("read-jsonl",),
    "sql-rows": ("rows-sqlite", "rows-duckdb", "rows-postgres", "rows-mariadb"),
    "postgres-changes": ("postgres-snapshot", "postgres-changes"),
    "mysql-changes": ("mysql-snapshot", "mysql-changes"),
    "delta-source": ("delta",),
    "kafka-records": ("kafka",),
    "kinesis-stream": ("kinesis",),
    "redis-stream": ("redis",),
    "nats-stream": ("nats",),
    "http-poll": ("http-list", "http-pages", "http-post", "http-cursor"),
}
"""The cases of contracts_sources.py, by entry point."""

SINKS = {
    "file-sink": (
        "jsonl", "jsonl-each-step", "jsonl-one-file", "csv-gzip", "parquet", "arrow", "jsonl-partitions",
        "parquet-partitions", "objects-partitions", "objects-jsonl", "objects-parquet",
    ),
    "sqlite": ("sqlite",),
    "sql-table": ("table-sqlite", "table-duckdb", "table-postgres", "table-mariadb"),
    "delta-target": ("delta",),
    "iceberg-target": ("iceberg",),
    "kafka-topic": ("kafka",),
    "redis-target": ("redis",),
    "nats-subject": ("nats",),
}  # fmt: skip
"""The cases of contracts_sinks.py, by entry point."""

ELSEWHERE = {
    "mqtt": "test_processors_mqtt.py", "mqtt-publisher": "test_processors_mqtt.py",
    "rabbitmq": "test_processors_rabbitmq.py", "rabbitmq-publisher": "test_processors_rabbitmq.py",
    "sqs": "test_processors_sqs.py", "sqs-sender": "test_processors_sqs.py",
    "kinesis-sender": "test_processors_kinesis.py", "http-requests": "test_processors_http.py",
    "event-stream": "test_event_stream.py", "websocket": "test_websocket.py", "webhook": "test_processors_webhook.py",
    "link-receiver": "test_link.py", "link-sender": "test_link.py", "duckdb": "test_processors_sql.py",
}  # fmt: skip
"""Entry points whose source or sink has no case of a contract, and the file with their tests."""

LISTS: dict[str, list[Any]] = {
    "postgres": contracts_sinks.POSTGRES, "mariadb": contracts_sinks.MARIADB, "kafka": contracts_sinks.KAFKA,
    "redis": contracts_sinks.REDIS, "nats": contracts_sinks.NATS, "kinesis": contracts_sources.KINESIS,
}  # fmt: skip


def points(kind: str) -> list[str]:
    """The names of the declared processors of a kind."""
    return [name for name, place in declared().items() if kind in processors.facts_of(loaded(place))["Kind"].split()]


PAIRS = [
    (source, sink)
    for one, other in itertools.product(points("source"), points("sink"))
    for source, sink in itertools.product(SOURCES.get(one, [one]), SINKS.get(other, [other]))
]
RUNNING = [pair for pair in PAIRS if not {*pair} & {*ELSEWHERE}]
FAST = [("jsonl", "jsonl"), ("csv", "sqlite")]
SOME = FAST + [pair for pair in RUNNING[31::31] if not pair[0].startswith("mysql")]
"""A stride that is prime to the numbers of sources and sinks, so that it meets most of both."""


def test_the_table_has_every_declared_source_and_sink_and_every_case() -> None:
    installed = {point.name for point in metadata.entry_points(group=processors.GROUP)}
    assert set(declared()) <= installed, "pip install -e . again: an entry point is new"
    for kind, cases, contracts in (
        ("source", SOURCES, contracts_sources.SOURCES),
        ("sink", SINKS, contracts_sinks.SINKS),
    ):
        known = {*cases, *ELSEWHERE}
        assert not set(points(kind)) - known, f"add the new {kind} to the contracts, or say where its tests are"
        assert {name for names in cases.values() for name in names} == set(contracts)
    assert set(ELSEWHERE) <= {*points("source"), *points("sink")}
    assert all((Path(__file__).parent / file).exists() for file in ELSEWHERE.values())


@pytest.fixture(scope="module")
def http_rows() -> Iterator[str]:
    with serving(contracts_sources.http_answer) as server:
        yield server.url


def case_of(name: str, cases: dict[str, Any], request: pytest.FixtureRequest) -> Any:
    if name in ELSEWHERE:
        pytest.skip(f"{name}: {ELSEWHERE[name]}")
    for module in cases[name].needs:
        pytest.importorskip(module)
    for server, found in LISTS.items():
        if server in name.replace("mysql", "mariadb"):
            found[:] = [request.getfixturevalue(server)]
    if name.startswith("http"):
        contracts_sources.HTTP[:] = [request.getfixturevalue("http_rows")]
    return cases[name]


def judge(source: str, sink: str, place: Path, request: pytest.FixtureRequest) -> None:
    one, other = (
        case_of(source, contracts_sources.SOURCES, request),
        case_of(sink, contracts_sinks.SINKS, request),
    )
    place /= uuid.uuid4().hex  # objects in memory outlive a test, and its directory may be named again
    for name in ("data", "target"):
        (place / name).mkdir(parents=True)
    read, target = one.make(place / "data"), other.make(place / "target")
    graph = contracts_sources.graph_over(read)
    graph.stream("rows", "numbers", id="number")(lambda message: {"n": int(one.row(message)["n"]) + 1})
    graph.add(cues.Sink(other.save, "numbers", id="save", batch=True, batch_size=9, checkpoint=target))
    with testing.temporary_store() as store:
        for _ in range(2):  # the second run has nothing new
            testing.run_until_idle(graph, store)
    assert sorted(other.numbers(target)) == [int(row["n"]) + 1 for row in contracts_sources.ROWS]


@pytest.mark.parametrize(("source", "sink"), slow_except(FAST, SOME, names=2))
def test_each_record_is_in_the_target_once(
    source: str, sink: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    judge(source, sink, tmp_path, request)


@pytest.mark.long
@pytest.mark.parametrize(("source", "sink"), PAIRS)
def test_each_record_is_in_the_target_once_of_all_pairs(
    source: str, sink: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    judge(source, sink, tmp_path, request)
