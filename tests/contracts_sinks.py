"""The contract of exactly-once sinks: what each of them shows by one line in :data:`SINKS`.

A case makes the target of ``checkpoint=`` in a directory, the function of the sink, and reads the numbers back from
outside. The tests in test_contracts_sinks.py run over all cases.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from kafka_broker import Broker
from nats_server import NatsServer
from redis_server import RedisServer

import cues
from cues import testing
from cues.processors import places, sql
from cues.processors.databases import DuckDB, Reader
from cues.processors.delta import DeltaTarget
from cues.processors.file_sink import FileSink
from cues.processors.iceberg import IcebergTarget
from cues.processors.kafka_sink import Topic
from cues.processors.nats_streams import NatsSubject
from cues.processors.redis_streams import RedisTarget
from cues.processors.sql_sink import Table

COUNT = 23
WANTED = [n for n in range(1, COUNT + 1) if n % 5]


class SinkCase(NamedTuple):
    """One kind of sink. ``needs`` are the modules without which it is skipped."""

    make: Callable[[Path], Any]
    save: Callable[..., None]
    numbers: Callable[[Any], list[int]]
    needs: tuple[str, ...] = ()


def _sqlite(path: Path) -> sql.SQLite:
    return sql.SQLite(path / "target.db", "create table if not exists numbers (n integer)")


def _insert(messages: Any, process: cues.Process) -> None:
    process.connection.executemany("insert into numbers values (:n)", messages)


def _selected(db: sql.SQLite) -> list[int]:
    with contextlib.closing(sqlite3.connect(db.path)) as connection:
        return [n for (n,) in connection.execute("select n from numbers order by rowid")]


POSTGRES: list[Any] = []
"""The server of the tests (tests/postgres.py), if a case needs it."""
MARIADB: list[Any] = []
"""The server of the tests (tests/mariadb_server.py), if a case needs it."""


def database(path: Path, kind: str) -> str:
    """The same new database for each call with this directory, also from another process."""
    if kind not in ("postgres", "mariadb"):
        return str(path / f"target.{kind}")
    url = path / "url"
    if not url.exists():
        path.mkdir(exist_ok=True)
        url.write_text((POSTGRES if kind == "postgres" else MARIADB)[0].database())
    return url.read_text()


def _table(kind: str) -> Callable[[Path], Table]:
    return lambda path: Table(database(path, kind), "numbers", {"n": "integer"})


def _table_numbers(table: Table) -> list[int]:
    reader = Reader(table.target if isinstance(table.target, DuckDB) else table.where)
    try:
        with reader.begin() as connection:
            # In the order of insertion: PostgreSQL and DuckDB append to a new table, too.
            order = {"sqlite": "rowid", "duckdb": "rowid", "postgresql": "ctid"}.get(connection.dialect)
            # MySQL has no such order for a query; its tables of InnoDB without a key are read in it.
            ordered = f" order by {order}" if order else ""
            return [n for (n,) in connection.rows(f"select n from numbers{ordered}")]
    finally:
        reader.close()


KAFKA: list[Any] = []
"""The broker of the tests (tests/kafka_broker.py), if a case needs it."""


def _topic(path: Path) -> Topic:
    return Topic(*kafka_topic(path), shape="value", key="n")


def kafka_topic(path: Path) -> tuple[str, str]:
    """The same new topic for each call with this directory, also from another process."""
    place = path / "topic"
    if not place.exists():
        path.mkdir(exist_ok=True)
        place.write_text(f"{KAFKA[0].servers} {KAFKA[0].topic()}")
    servers, topic = place.read_text().split()
    return servers, topic


def _topic_numbers(topic: Topic) -> list[int]:
    return [json.loads(record.value())["n"] for record in Broker(topic.servers).records(topic.topic)]


REDIS: list[RedisServer] = []
"""The server of the tests (tests/redis_server.py), if a case needs it."""


def redis_stream(path: Path) -> tuple[str, str]:
    """The same new stream for each call with this directory, also from another process."""
    place = path / "stream"
    if not place.exists():
        path.mkdir(exist_ok=True)
        place.write_text(f"{REDIS[0].url} {REDIS[0].stream()}")
    url, stream = place.read_text().split()
    return url, stream


def _redis(path: Path) -> RedisTarget:
    url, stream = redis_stream(path)
    return RedisTarget(url, stream, prefix=stream + ".p")


def _redis_numbers(target: RedisTarget) -> list[int]:
    return [int(fields[b"n"]) for _, fields in target.client.xrange(target.stream)]


def _delta(path: Path) -> DeltaTarget:
    return DeltaTarget(path / "table", evolve=True)


def delta_rows(target: DeltaTarget, columns: str = "*") -> list[dict[str, Any]]:
    """The rows of a table. The reader of delta-rs for pyarrow ends some processes with an abort, so it is not used."""
    import pyarrow as pa
    from deltalake import QueryBuilder

    table = target.open()
    if table is None:
        return []
    found: list[dict[str, Any]] = pa.table(
        QueryBuilder().register("t", table).execute(f"select {columns} from t")
    ).to_pylist()
    return found


def _iceberg(path: Path) -> IcebergTarget:
    path.mkdir(parents=True, exist_ok=True)
    catalog = {"type": "sql", "uri": f"sqlite:///{path}/catalog.db", "warehouse": f"file://{path}"}
    return IcebergTarget("lake.numbers", catalog=catalog, evolve=True)


def iceberg_rows(target: IcebergTarget) -> list[dict[str, Any]]:
    table = target.open()
    found: list[dict[str, Any]] = [] if table is None else table.scan().to_arrow().to_pylist()
    return found


def _iceberg_numbers(target: IcebergTarget) -> list[int]:
    return sorted(row["n"] for row in iceberg_rows(target))


def _delta_numbers(target: DeltaTarget) -> list[int]:
    return sorted(row["n"] for row in delta_rows(target, "n"))


NATS: list[NatsServer] = []
"""The server of the tests (tests/nats_server.py), if a case needs it."""


def nats_stream(path: Path) -> tuple[str, str]:
    """The same new stream for each call with this directory, also from another process."""
    place = path / "stream"
    if not place.exists():
        path.mkdir(exist_ok=True)
        place.write_text(f"{NATS[0].url} {NATS[0].stream()}")
    url, stream = place.read_text().split()
    return url, stream


class _WithoutIdentities(NatsSubject):
    """A target whose repetitions the server cannot know by their ids, so that its duplicate window repairs nothing."""

    def identity(self, processor: str, delivery: cues.Delivery, index: int) -> str:
        return uuid.uuid4().hex


def _nats(path: Path) -> NatsSubject:
    url, stream = nats_stream(path)
    return _WithoutIdentities(url, stream, f"{stream}.numbers")


def _nats_numbers(target: NatsSubject) -> list[int]:
    return [json.loads(data)["n"] for data in NATS[0].messages(target.stream)]


def _files(format: str, **options: Any) -> Callable[[Path], FileSink]:
    return lambda path: FileSink(path / "out", format, **{"roll_bytes": 40, "durability": "process", **options})


def _objects(format: str, **options: Any) -> Callable[[Path], FileSink]:
    return lambda path: FileSink(f"memory://{path.parent.name}-{path.name}/out", format, **options)


def file_numbers(sink: FileSink) -> list[int]:
    """The numbers in all finished files, after the open one was finished."""
    from cues.processors.file_source import Files

    names = sink.finish()
    scheme = sink.path.partition("://")[0] + "://" if places.is_remote(sink.path) else ""
    rows = [row for name in names for _, row in Files(scheme + name)(None)]
    return [int(row["n"]) for row in rows if isinstance(row, dict)]


def third(row: dict[str, Any]) -> dict[str, Any]:
    """A function for ``partition_by=``."""
    return {"third": row["n"] % 3, "big": row["n"] > 9}


def partition_numbers(sink: FileSink) -> list[int]:
    """The numbers in all finished files, sorted. Each directory has those of its values, in their order."""
    from cues.processors.file_source import Files

    found: dict[tuple[str, str], list[int]] = {}
    scheme = sink.path.partition("://")[0] + "://" if places.is_remote(sink.path) else ""
    for name in sink.finish():
        rows = [row for _, row in Files(scheme + name)(None) if row is not None]
        directory, _, file = name.rpartition("/")
        found.setdefault((directory, file.split("-")[1]), []).extend(int(row["n"]) for row in rows)
    for (directory, _), numbers in found.items():
        names = [f"/third={n % 3}/big={str(n > 9).lower()}" for n in numbers]
        assert all(directory.endswith(name) for name in names), (directory, numbers)
        assert numbers == sorted(numbers) or len({*numbers}) < len(numbers)  # the control doubles some
    return sorted(n for numbers in found.values() for n in numbers)


def write(messages: Any, process: cues.Process) -> None:
    """The function of every case: each target has a connection that takes messages."""
    process.connection.write(messages)


SINKS = {
    "sqlite": SinkCase(_sqlite, _insert, _selected),
    "table-sqlite": SinkCase(_table("db"), write, _table_numbers, ("sqlalchemy",)),
    "table-duckdb": SinkCase(_table("duckdb"), write, _table_numbers, ("sqlalchemy", "duckdb")),
    "table-postgres": SinkCase(_table("postgres"), write, _table_numbers, ("sqlalchemy", "psycopg")),
    "table-mariadb": SinkCase(_table("mariadb"), write, _table_numbers, ("sqlalchemy", "pymysql")),
    "delta": SinkCase(_delta, write, _delta_numbers, ("deltalake",)),
    "iceberg": SinkCase(_iceberg, write, _iceberg_numbers, ("pyiceberg",)),
    "kafka": SinkCase(_topic, write, _topic_numbers, ("confluent_kafka",)),
    "redis": SinkCase(_redis, write, _redis_numbers, ("redis",)),
    "nats": SinkCase(_nats, write, _nats_numbers, ("nats",)),
    "jsonl": SinkCase(_files("jsonl"), write, file_numbers),
    "jsonl-each-step": SinkCase(_files("jsonl", roll_bytes=0), write, file_numbers),
    "jsonl-one-file": SinkCase(_files("jsonl", roll_bytes=10**9), write, file_numbers),
    "csv-gzip": SinkCase(_files("csv", compression="gzip"), write, file_numbers),
    "parquet": SinkCase(_files("parquet"), write, file_numbers, ("pyarrow",)),
    "arrow": SinkCase(_files("arrow", roll_bytes=10**9), write, file_numbers, ("pyarrow",)),
    "jsonl-partitions": SinkCase(
        _files("jsonl", roll_bytes=30, partition_by=third, open_files_max=2), write, partition_numbers
    ),
    "parquet-partitions": SinkCase(_files("parquet", partition_by=third), write, partition_numbers, ("pyarrow",)),
    "objects-partitions": SinkCase(_objects("jsonl", partition_by=third), write, partition_numbers, ("fsspec",)),
    "objects-jsonl": SinkCase(_objects("jsonl"), write, file_numbers, ("fsspec",)),
    "objects-parquet": SinkCase(_objects("parquet"), write, file_numbers, ("fsspec", "pyarrow")),
}
"""A new sink joins here."""

IN_PROCESSES = (
    "sqlite",
    "jsonl",
    "csv-gzip",
    "jsonl-partitions",
    "parquet",
    "table-sqlite",
    "table-duckdb",
    "table-postgres",
    "table-mariadb",
    "delta",
    "iceberg",
    "kafka",
    "redis",
    "nats",
)
"""Those whose target other processes can see."""


def graph_over(case: SinkCase, target: Any, batch_size: int = 4, **options: Any) -> cues.Graph:
    """The numbers that are no multiple of five, into the target."""
    graph = cues.Graph("g", errors="errors")
    graph.source("q")
    sink = cues.Sink(
        case.save,
        "q",
        id="save",
        batch=True,
        batch_size=batch_size,
        errors=None,
        checkpoint=target,
        where=lambda message: message["n"] % 5 != 0,
        **options,
    )
    graph.add(sink)
    return graph


def feed(store: cues.Store) -> None:
    store.queue("q").appender().write_many([{"n": n} for n in range(1, COUNT + 1)])


def run_child(name: str, path: str) -> None:
    """Run a case to its end in this process; a test kills it on the way."""
    case = SINKS[name]
    with cues.open(Path(path, "store"), durability="process") as store:
        if "q" not in store.queues():
            feed(store)
        slow = Path(path, "slow").exists()

        def save(messages: Any, process: cues.Process) -> None:
            print(json.dumps([m["n"] for m in messages]), flush=True)
            case.save(messages, process)
            if slow:
                time.sleep(0.01)

        testing.run_until_idle(graph_over(case._replace(save=save), case.make(Path(path)), batch_size=2), store)
