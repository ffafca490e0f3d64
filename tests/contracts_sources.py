"""The contract of exactly-once sources: what each of them shows by one line in :data:`SOURCES`.

A case writes its data into a directory and returns the function of the source. The tests in test_contracts_sources.py
run over all cases.
"""

from __future__ import annotations

import contextlib
import csv
import gzip
import json
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from urllib.parse import parse_qs, urlsplit

from contracts_sinks import NATS, REDIS, database, kafka_topic, nats_stream, redis_stream
from http_servers import Reply, Seen
from kinesis_server import KinesisServer
from small import until

import cues
from cues import testing
from cues.graphs.processor import wants_process
from cues.processors import files
from cues.processors.delta_source import DeltaSource
from cues.processors.file_source import Files
from cues.processors.kafka_source import Records
from cues.processors.nats_streams import NatsStream
from cues.processors.redis_streams import RedisStream
from cues.processors.sql_sink import Table
from cues.processors.sql_source import Rows

ROWS = [{"n": str(n), "s": f"é{n}"} for n in range(40)]
"""The messages of every case. CSV knows only text."""

Source = Callable[..., Iterator[Any]]


class SourceCase(NamedTuple):
    """One kind of source. ``make`` writes :data:`ROWS`; ``needs`` are the modules without which it is skipped."""

    make: Callable[[Path], Source]
    needs: tuple[str, ...] = ()
    row: Callable[[Any], Any] = lambda message: message


def _parts() -> list[list[dict[str, str]]]:
    """The rows in files of several sizes, one of them empty."""
    return [ROWS[:1], ROWS[1:20], [], ROWS[20:33], ROWS[33:]]


def _jsonl(rows: list[dict[str, str]]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def _write(path: Path, format: str) -> list[Path]:
    paths: list[Path] = sorted(path.glob(f"*.{format}"))
    if len(paths) == len(_parts()):
        return paths
    paths = []
    for number, rows in enumerate(_parts()):
        name = path / f"{number}.{format}"
        if format == "csv":
            with open(name, "w", newline="") as file:
                writer = csv.DictWriter(file, ["n", "s"])
                writer.writeheader()
                writer.writerows(rows)
        elif format in ("parquet", "arrow"):
            import pyarrow as pa
            import pyarrow.parquet as pq

            table = pa.Table.from_pylist(rows, schema=pa.schema([("n", pa.string()), ("s", pa.string())]))
            if format == "parquet":
                pq.write_table(table, name, row_group_size=4)
            else:
                with pa.ipc.new_file(str(name), table.schema) as out:
                    out.write_table(table, max_chunksize=4)
        elif format == "avro":
            import fastavro

            fields = [{"name": "n", "type": "string"}, {"name": "s", "type": "string"}]
            with open(name, "wb") as file:
                fastavro.writer(file, {"type": "record", "name": "r", "fields": fields}, rows, sync_interval=60)
        elif format == "json":
            name.write_text(json.dumps(rows, indent=1))
        elif format == "jsonl.gz":
            name.write_bytes(gzip.compress(_jsonl(rows)))
        else:
            name.write_bytes(_jsonl(rows))
        paths.append(name)
    return paths


def _files(ending: str, **options: Any) -> Callable[[Path], Source]:
    def make(path: Path) -> Source:
        _write(path, ending)
        return Files(path / f"*.{ending}", **options)

    return make


def _read_csv(path: Path) -> Source:
    paths = _write(path, "csv")
    return lambda position: files.read_csv(*paths, position=position)


def _read_jsonl(path: Path) -> Source:
    paths = _write(path, "jsonl")
    return lambda position: files.read_jsonl(*paths, position=position)


def _tailed(path: Path) -> Source:
    """A log that was rotated three times, of which a run saw only the beginning."""
    log = path / "app.jsonl"
    for number, rows in enumerate(_parts()):
        log.write_bytes(_jsonl(rows))
        if number < 4:
            log.rename(f"{log}.{4 - number}")
    source = Files(log, follow=True, idle_exit_s=0, grace_s=0, poll_s=0.001)

    def begin(position: Any, process: Any) -> Iterator[Any]:
        if position is None:  # the file from which everything follows
            found = Path(f"{log}.4").stat()
            position = [1, "", [], [str(log), found.st_dev, found.st_ino, 0, b""], 0, 0]
        yield from source(position, process)

    return begin


def _rows(kind: str, **options: Any) -> Callable[[Path], Source]:
    """A table that was written out of order, in which several rows have the same watermark."""

    def make(path: Path) -> Source:
        target = database(path, kind)
        if not (path / "filled").exists():
            table = Table(target, "data", {"day": "date", "k": "integer", "n": "text", "s": "text"})
            table_rows = [{"day": date(2026, 1, 1 + k // 9), "k": k, **row} for k, row in enumerate(ROWS)]
            delivery = cues.Delivery(b"x" * 16, 0, {"t": 0}, {"t": 1}, 1, "ab" * 8)
            with table.transaction(SimpleNamespace(id="g.fill", delivery=delivery)) as opened:  # type: ignore[arg-type]
                opened.connection.write(table_rows[::-1])
            table.close()
            (path / "filled").touch()
        return Rows(target, "data", ["day", "k"], columns=["n", "s"], page_rows=20, **options)

    return make


def _delta(path: Path) -> Source:
    """A table whose rows are in a snapshot and in later versions, one of them a compaction; order is that of files."""
    import pyarrow as pa
    from deltalake import DeltaTable, write_deltalake

    table = path / "table"
    if not (path / "filled").exists():
        for rows in (ROWS[:20], ROWS[20:33], ROWS[33:]):
            write_deltalake(table, pa.Table.from_pylist(rows), mode="append")
            DeltaTable(table).optimize.compact()
        (path / "filled").touch()
    return DeltaSource(table, begin=0, batch_rows=6)


def _records(path: Path) -> Source:
    """A topic of which some records were written in transactions, one of them aborted."""
    from confluent_kafka import Producer

    if not (path / "topic").exists():
        servers, topic = kafka_topic(path)
        producer = Producer({"bootstrap.servers": servers, "transactional.id": topic, "log_level": 0})
        producer.init_transactions(30)
        for number, rows in enumerate(_parts()):
            producer.begin_transaction()
            for row in rows:
                producer.produce(topic, json.dumps(row), headers={"part": str(number)})
            if number == 2:  # an empty part
                producer.produce(topic, "aborted")
                producer.flush(30)
                producer.abort_transaction(30)
            else:
                producer.commit_transaction(30)
    return Records(*kafka_topic(path), value="json", shape="value")


def _entries(path: Path) -> Source:
    """A stream of which an entry was removed, before the source began."""
    if not (path / "stream").exists():
        _, stream = redis_stream(path)
        (gone,) = REDIS[0].add(stream, {"n": "gone"})
        REDIS[0].add(stream, *ROWS)
        with contextlib.closing(REDIS[0].client) as client:
            client.xdel(stream, gone)
    return RedisStream(*redis_stream(path))


def _nats_messages(path: Path) -> Source:
    """A stream of which messages were purged, and deleted between others, before the source began."""
    if not (path / "stream").exists():
        _, stream = nats_stream(path)
        NATS[0].publish(f"{stream}.rows", b"purged", *(json.dumps(row).encode() for row in ROWS[:20]), b"deleted")
        NATS[0].publish(f"{stream}.rows", *(json.dumps(row).encode() for row in ROWS[20:]))
        NATS[0].ask(lambda js: js.purge_stream(stream, seq=2))
        NATS[0].ask(lambda js: js.delete_msg(stream, 22))
    return NatsStream(*nats_stream(path), data="json", shape="value")


KINESIS: list[KinesisServer] = []
"""The server of the tests (tests/kinesis_server.py), if a case needs it."""


def _shards(path: Path) -> Source:
    """A stream of one key, whose shard was split and merged between its records."""
    from cues.processors.kinesis import KinesisStream

    place = path / "stream"
    if not place.exists():
        server, stream = KINESIS[0], KINESIS[0].stream(1)
        for number, rows in enumerate(_parts()):
            server.put(stream, *(("key", json.dumps(row).encode()) for row in rows))
            server.split(stream) if number % 2 == 0 else server.merge(stream)
        place.write_text(f"{server.url} {stream}")
    url, stream = place.read_text().split()
    return KinesisStream(stream, endpoint_url=url, data="json", shape="value", poll_s=0.2)


def _postgres(snapshot: bool) -> Callable[[Path], Source]:
    """A table that is there, in the order of its key; or the same rows as changes, in several transactions."""

    def make(path: Path) -> Source:
        import psycopg

        from cues.processors import postgres_wire
        from cues.processors.postgres_changes import Changes

        postgres_wire.CLOSE_S = 0.0  # the cases have no method committed()
        url = database(path, "postgres")
        slot = f"slot_{url.rpartition('%3D')[2]}"
        if not (path / "filled").exists():
            with psycopg.connect(url.replace("+psycopg", ""), autocommit=True) as sql:
                sql.execute(
                    f"create table data (k int primary key, n text, s text); create publication {slot} for table data"
                )
                sql.execute(f"select pg_create_logical_replication_slot('{slot}_first', 'pgoutput')")
                rows = [(k, *row.values()) for k, row in enumerate(ROWS)]
                for part in (rows[:1], rows[1:20], rows[20:]):
                    with sql.transaction(), sql.cursor() as cursor:
                        cursor.executemany("insert into data values (%s, %s, %s)", part)
            (path / "filled").touch()
        source = Changes(url, "data", slot=slot, snapshot=snapshot)

        def begin(position: Any, process: Any) -> Iterator[Any]:
            if position is None:  # a store of its own has a slot of its own, from before the rows
                with psycopg.connect(url.replace("+psycopg", ""), autocommit=True) as sql:
                    where = f"from pg_replication_slots where slot_name = '{slot}'"
                    sql.execute(f"select pg_terminate_backend(active_pid) {where} and active")  # of a run that crashed
                    until(lambda: not sql.execute(f"select 1 {where} and active").fetchone())
                    sql.execute(f"select pg_drop_replication_slot(slot_name) {where}")
                    sql.execute(f"select pg_copy_logical_replication_slot('{slot}_first', '{slot}')")
            yield from source(position, process)

        return begin

    return make


def _mysql(snapshot: bool) -> Callable[[Path], Source]:
    """The same table in MySQL."""

    def make(path: Path) -> Source:
        import sqlalchemy as sa

        from cues.processors.mysql_changes import Changes

        url = database(path, "mariadb")
        if not (path / "filled").exists():
            engine = sa.create_engine(url)
            with engine.connect() as sql:
                sql.exec_driver_sql("create table data (k int primary key, n text, s text)")
                file, place, *_ = sql.exec_driver_sql("show master status").one()
                gtids = sql.exec_driver_sql(f"select binlog_gtid_pos('{file}', {place})").scalar_one()
                for part in (ROWS[:1], ROWS[1:20], ROWS[20:]):
                    rows = [(int(row["n"]), *row.values()) for row in part]
                    sql.exec_driver_sql("insert into data values (%s, %s, %s)", rows)
                    sql.commit()
            engine.dispose()
            (path / "filled").write_text(json.dumps([1, file, place, 0, gtids]))
        first = None if snapshot else json.loads((path / "filled").read_text())

        def begin(position: Any, process: Any) -> Iterator[Any]:
            yield from Changes(url, "data", snapshot=snapshot)(position or first, process)

        return begin

    return make


def _row_of_change(message: Any) -> Any:
    return {name: value for name, value in message["row"].items() if name != "k"}


def _without_metadata(message: Any) -> Any:
    return {name: value for name, value in message.items() if name != "q/meta"}


HTTP: list[str] = []
"""The URL of the server of the tests (:func:`http_answer`), if a case needs it."""


def http_answer(request: Seen) -> Reply:
    """The rows as a list, as pages, or after a cursor. A server without memory, so a restart sees the same."""
    place = urlsplit(request.path)
    query = {name: int(values[0]) for name, values in parse_qs(place.query).items()}
    if place.path == "/list":
        if request.headers.get("if-none-match") == '"1"':
            return Reply(304)
        return Reply(200, json.dumps(ROWS).encode(), {"ETag": '"1"'})
    if place.path == "/pages":
        page = query.get("page", 0)
        following = f"/pages?page={page + 1}" if page + 1 < len(_parts()) else None
        return Reply(200, json.dumps({"data": {"rows": _parts()[page], "next": following}}).encode())
    if place.path == "/search":
        page = json.loads(request.body)["page"]
        more = {"next": page + 1} if page + 1 < len(_parts()) else {}
        return Reply(200, json.dumps({"rows": _parts()[page], **more}).encode())
    start = query.get("after", -1) + 1
    return Reply(200, json.dumps(ROWS[start : start + 9]).encode())


def _poll(path: str, **options: Any) -> Callable[[Path], Source]:
    def make(_: Path) -> Source:
        from cues.processors.http_source import Poll

        return Poll(f"{HTTP[0]}{path}", **{"interval_s": None, **options})

    return make


def _after(answer: Any) -> str | None:
    rows = answer.json()
    return f"?after={rows[-1]['n']}" if rows else None


SOURCES = {
    "read-csv": SourceCase(_read_csv),
    "read-jsonl": SourceCase(_read_jsonl),
    "jsonl": SourceCase(_files("jsonl")),
    "jsonl-gzip": SourceCase(_files("jsonl.gz")),
    "csv": SourceCase(_files("csv")),
    "text": SourceCase(_files("jsonl", format="text"), row=lambda message: json.loads(message["line"])),
    "parquet": SourceCase(_files("parquet"), ("pyarrow",)),
    "delta": SourceCase(_delta, ("deltalake", "pyarrow")),
    "json": SourceCase(_files("json", format="json")),
    "avro": SourceCase(_files("avro"), ("fastavro",)),
    "arrow": SourceCase(_files("arrow"), ("pyarrow",)),
    "last-grows": SourceCase(_files("jsonl", follow=True, idle_exit_s=0, grace_s=0, poll_s=0.001)),
    "tail": SourceCase(_tailed),
    "kafka": SourceCase(_records, ("confluent_kafka",), _without_metadata),
    "redis": SourceCase(_entries, ("redis",), _without_metadata),
    "nats": SourceCase(_nats_messages, ("nats",), _without_metadata),
    "kinesis": SourceCase(_shards, ("boto3", "moto"), _without_metadata),
    "rows-sqlite": SourceCase(_rows("db"), ("sqlalchemy",)),
    "rows-duckdb": SourceCase(_rows("duckdb"), ("sqlalchemy", "duckdb")),
    "rows-postgres": SourceCase(_rows("postgres"), ("sqlalchemy", "psycopg")),
    "rows-mariadb": SourceCase(_rows("mariadb"), ("sqlalchemy", "pymysql")),
    "postgres-snapshot": SourceCase(_postgres(snapshot=True), ("psycopg",), _row_of_change),
    "postgres-changes": SourceCase(_postgres(snapshot=False), ("psycopg",), _row_of_change),
    "mysql-snapshot": SourceCase(_mysql(snapshot=True), ("sqlalchemy", "pymysql"), _row_of_change),
    "mysql-changes": SourceCase(_mysql(snapshot=False), ("sqlalchemy", "pymysql"), _row_of_change),
    "http-list": SourceCase(_poll("/list", id="n"), ("httpx",)),
    "http-pages": SourceCase(_poll("/pages", items="data.rows", next="data.next"), ("httpx",)),
    "http-post": SourceCase(
        _poll("/search", items="rows", cursor="next", json=lambda cursor: {"page": cursor or 0}), ("httpx",)
    ),
    "http-cursor": SourceCase(_poll("/after", next=_after), ("httpx",)),
}
"""A new source joins here."""


def graph_over(source: Source) -> cues.Graph:
    graph = cues.Graph("g")

    @graph.source("rows", batch_size=7)
    def rows(position: Any, process: Any) -> Iterator[Any]:
        yield from begun(source, position, process)

    return graph


def begun(source: Source, position: Any, process: Any) -> Iterator[Any]:
    """Call a source; one with a state gets the process that has it."""
    return source(position, process) if wants_process(source) else source(position)


def run_child(name: str, path: str) -> None:
    """Run a case to its end in this process; a test kills it on the way. Equal data are written at each start."""
    source = SOURCES[name].make(Path(path, "data"))

    def slowly(position: Any, process: Any) -> Iterator[Any]:
        for item in begun(source, position, process):
            print("row", flush=True)
            yield item

    with cues.open(Path(path, "store"), durability="process") as store:
        testing.run_until_idle(graph_over(slowly), store)
