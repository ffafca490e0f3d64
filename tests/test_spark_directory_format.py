"""The format cues over queues of a shared directory: tables and streams of indices, whatever files hold them."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import cues
from cues import codec

pytest.importorskip("pyspark", reason="pyspark is not installed (pip install 'cues-streams[test]')")
pytest.importorskip("grpc", reason="Spark Connect is not installed (pip install 'cues-streams[test]')")

from children import Child
from pyspark.errors import AnalysisException, PySparkException
from pyspark.sql import types as T
from pyspark.sql.streaming.datasource import ReadMaxRows
from test_spark_connect import server  # noqa: F401  (a fixture)
from test_spark_format import fill, finish, load
from test_spark_queues import numbers, owner

from cues.errors import Diverged, InvalidArgument, MessagesPurged
from cues.spark.cluster.data import Writer
from cues.spark.cluster.directory import QueueDirectory
from cues.spark.cluster.files import open_files
from cues.spark.cluster.maintenance import Maintenance
from cues.spark.cluster.parquet import StoredFile
from cues.spark.options import READ, READ_STREAM, ReadOptions, WriteOptions
from cues.spark.reading import ROW, QueueReader
from cues.spark.streams import QueueStream

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming import StreamingQuery

pytestmark = pytest.mark.timeout(600)

DAY = datetime(2026, 1, 1, tzinfo=UTC)
"""The time of the first file; the next ones are a day later each."""


def queue_of(place: Path | str, *files: Sequence[dict[str, Any]], queue: str = "in") -> QueueDirectory:
    """A queue with a data file of each of these, as a feeder leaves it."""
    shared = open_files(str(place))
    shared.ensure("_cues/id.json", b'{"id": "1"}')
    directory = QueueDirectory(shared, queue, cues.QueueOptions())
    directory.own("g")
    for messages in files:
        append(directory, messages)
    return directory


def append(directory: QueueDirectory, messages: Sequence[dict[str, Any]]) -> None:
    number = len(directory.live)
    time_us = int((DAY + timedelta(days=number)).timestamp()) * 1_000_000
    writer = Writer(directory.files, directory.folder, "g.in.feed", number, 0)
    hashes = [None if m["n"] % 2 else f"{m['n']:032x}" for m in messages]
    writer.add([codec.pack(message) for message in messages], hashes, None, [time_us] * len(messages))
    file = writer.close()
    assert file is not None
    directory.publish("g.in.feed", number, directory.numbered([file]))


def ints(low: int, high: int) -> list[dict[str, Any]]:
    return [{"n": n, "text": "x" * (n % 50)} for n in range(low, high)]


def options(place: Path | str, known: tuple[str, ...] = READ, queue: str = "in", **said: str) -> ReadOptions:
    return ReadOptions.of({"path": f"{place}#{queue}", **said}, known)


def indices(reader: Any, parts: Any = None) -> list[int]:
    """The indices that a reader reads, as a task does it."""
    slices = reader.partitions() if parts is None else parts
    return [index for part in slices for rows in reader.read(part) for index in rows.column("index").to_pylist()]


# --- tables -------------------------------------------------------------------------------------


def test_sql_over_a_queue_that_a_graph_wrote(spark: SparkSession, tmp_path: Path) -> None:
    """Rows and declared columns, in tasks that begin and end inside files; the values are those in the files."""
    queue_of(tmp_path, ints(0, 20))
    stage = owner(tmp_path, spark, batch_size=5, side_effects=True)
    while stage.step():
        pass
    table = load(spark, f"{tmp_path}#out", fields="n long, m string", partitions=3)
    assert table.dtypes[:4] == [("index", "bigint"), ("time", "timestamp"), ("hash", "string"), ("value", "binary")]
    assert table.rdd.getNumPartitions() == 3
    rows = table.collect()
    assert [row["index"] for row in rows] == list(range(1, 21))
    assert [row.n for row in rows] == [codec.unpack(bytes(row.value))["n"] for row in rows] == numbers(tmp_path)
    assert {row.m for row in rows} == {None} and all(len(row.hash) == 32 and row.time for row in rows)
    spark.sql(f"create or replace temporary view out using cues options (path '{tmp_path}#out', fields 'n long')")
    assert spark.sql("select sum(n), count(hash) from out where index > 10").first() == (sum(range(20, 40, 2)), 10)
    narrow = spark.read.format("cues").schema("n long, index bigint").load(f"file://{tmp_path}#out")
    assert [tuple(row) for row in narrow.collect()] == [(2 * n, n + 1) for n in range(20)]
    with pytest.raises(PySparkException, match=r"Message 1, field n: found int \(0\), expected a str"):
        load(spark, f"{tmp_path}#out", fields="n string", mode="strict").collect()


def test_every_range_of_every_split_is_read_once(tmp_path: Path) -> None:
    """Over files of several row groups: in any number of tasks, from anywhere to anywhere."""
    queue_of(tmp_path, ints(0, 30_000), ints(30_000, 30_001), ints(30_001, 60_000))
    for start, end, tasks in [(1, 60_001, 7), (16_384, 16_386, 1), (29_999, 30_003, 4), (60_000, 60_001, 3), (7, 7, 2)]:
        said = {"startingPosition": str(start), "endingPosition": str(end), "partitions": str(tasks)}
        assert indices(QueueReader(ROW, options(tmp_path, **said), 2)) == list(range(start, end))
    with pytest.raises(InvalidArgument, match="ends before 60001"):
        QueueReader(ROW, options(tmp_path, startingPosition="60002"), 1)
    assert indices(QueueReader(ROW, options(tmp_path, startingPosition="latest"), 1)) == []


def test_a_time_is_a_place(tmp_path: Path) -> None:
    queue_of(tmp_path, *(ints(n * 10, n * 10 + 10) for n in range(6)))
    for hours, index in [(-1, 1), (0, 1), (1, 11), (24, 11), (25, 21), (5 * 24, 51), (5 * 24 + 1, 61)]:
        when = (DAY + timedelta(hours=hours)).isoformat()
        assert QueueReader(ROW, options(tmp_path, startingPosition=when), 1).start == (index,)


def test_a_queue_without_messages_and_one_that_is_not_there(spark: SparkSession, tmp_path: Path) -> None:
    queue_of(tmp_path)
    assert load(spark, f"{tmp_path}#in").collect() == []
    with pytest.raises(AnalysisException, match=f"The directory {tmp_path} has no queue 'inn'.*cues status {tmp_path}"):
        load(spark, f"{tmp_path}#inn").collect()
    assert not (tmp_path / "inn").exists()


# --- nothing else is read -----------------------------------------------------------------------


def test_only_files_of_the_range_are_opened(spark: SparkSession, tmp_path: Path) -> None:
    """The other files are gone, which nobody notices."""
    directory = queue_of(tmp_path, *(ints(n * 10, n * 10 + 10) for n in range(5)))
    for file in (*directory.live[:2], *directory.live[3:]):
        (tmp_path / "in" / file.name).unlink()
    for start, end, count in [("21", "31", 10), ("25", "26", 1), ("30", "30", 0)]:
        assert load(spark, f"{tmp_path}#in", startingPosition=start, endingPosition=end).count() == count
    with pytest.raises(PySparkException, match="which a step has committed, is missing"):
        load(spark, f"{tmp_path}#in").count()


@pytest.mark.parametrize("kind", ["store", "directory"])
def test_queries_on_one_table_do_not_change_each_other(spark: SparkSession, tmp_path: Path, kind: str) -> None:
    """Spark reads the second query by the plan of the first one, if a reader takes filters."""
    if kind == "store":
        fill(tmp_path / kind, "in", ints(0, 10))
    else:
        queue_of(tmp_path / kind, ints(0, 10))
    spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
    try:
        table = load(spark, f"{tmp_path / kind}#in")
        assert table.where("index > 7").count() == 3
        assert table.count() == 10
        assert table.where("index > 7").union(table.where("index > 3")).count() == 10
    finally:
        spark.conf.unset("spark.sql.python.filterPushdown.enabled")


def test_columns_that_nobody_asked_for_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    queue_of(tmp_path, ints(0, 10), ints(10, 20))
    read = []
    real = StoredFile.read

    def remember(self: StoredFile, groups: Any, columns: Any = None) -> Any:
        read.append(columns)
        return real(self, groups, columns)

    monkeypatch.setattr(StoredFile, "read", remember)
    for schema, columns in [
        (ROW, ["time", "hash", "value"]),
        (T.StructType([ROW["index"]]), []),
        (T.StructType([ROW["index"], T.StructField("n", T.LongType())]), ["value"]),
    ]:
        assert indices(QueueReader(schema, options(tmp_path), 1)) == list(range(1, 21))
        assert sorted(read) == sorted([column] for column in columns * 2)
        read.clear()


# --- streams ------------------------------------------------------------------------------------


def copied(spark: SparkSession, place: Path, **said: Any) -> StreamingQuery:
    """Copy what is there from the directory's queue ``out`` into the store's, exactly once."""
    reader = spark.readStream.format("cues").options(maxMessagesPerTrigger=7, **said)
    writer = reader.load(f"{place}#out").writeStream.format("cues").option("id", "copy")
    writer = writer.option("checkpointLocation", str(place / "checkpoint")).trigger(availableNow=True)
    return writer.start(f"{place / 'store'}#copy")


def test_a_merge_between_two_batches_repeats_and_skips_nothing(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after a restart, and if the files that were merged are gone from the disk."""
    directory = queue_of(tmp_path, ints(0, 60))
    stage = owner(tmp_path, spark, batch_size=4, side_effects=True)
    while stage.step():
        pass
    out = stage.driver.queues["out"]
    stream = QueueStream(ROW, options(tmp_path, READ_STREAM, queue="out"), 1)
    at = stream.initialOffset()
    first = stream.latestOffset(at, ReadMaxRows(10))
    assert indices(stream, stream.partitions(at, first)) == list(range(1, 11))
    assert finish(copied(spark, tmp_path)) == [(0, 7), *((n, 7) for n in range(1, 8)), (8, 4)]
    keeper = Maintenance(stage.driver, [stage])
    keeper.merge_files = 6
    keeper.merge(out.log(0))
    monkeypatch.setattr("cues.spark.cluster.directory.KEEP_FILES_H", 0)
    keeper.vacuum()
    assert len(list((tmp_path / "out").rglob("*.parquet"))) == len(out.live) < 6
    second = stream.latestOffset(first, ReadMaxRows(1000))  # the same reader, and a new one
    assert indices(stream, stream.partitions(first, second)) == list(range(11, 61))
    again = QueueStream(ROW, options(tmp_path, READ_STREAM, queue="out"), 1)
    assert indices(again, again.partitions(at, first)) == list(range(1, 11))
    append(directory, ints(60, 80))
    stage.driver.queues["in"].read_on()
    while stage.step():
        pass
    assert finish(copied(spark, tmp_path)) == [(9, 7), (10, 7), (11, 6)]
    with cues.open(tmp_path / "store", readonly=True) as store:
        assert [message["n"] for message in store.queue("copy").tailer()] == [2 * n for n in range(80)]


def test_purged_messages_are_an_error_or_skipped(spark: SparkSession, tmp_path: Path) -> None:
    directory = queue_of(tmp_path, *(ints(n * 10, n * 10 + 10) for n in range(5)))
    stream = QueueStream(ROW, options(tmp_path, READ_STREAM), 1)
    start = stream.initialOffset()
    directory.replace(directory.live[:2], [])
    assert indices(QueueReader(ROW, options(tmp_path), 1)) == list(range(21, 51))  # what is there
    with pytest.raises(MessagesPurged, match=r"messages 3 to 20 of .*#in were purged.*failOnDataLoss"):
        QueueReader(ROW, options(tmp_path, startingPosition="3"), 1)
    lenient = options(tmp_path, startingPosition="3", failOnDataLoss="false")
    assert indices(QueueReader(ROW, lenient, 1)) == list(range(21, 51))
    end = stream.latestOffset(start, ReadMaxRows(25))
    with pytest.raises(MessagesPurged, match="messages 1 to 20"):
        stream.partitions(start, end)
    lenient_stream = QueueStream(ROW, options(tmp_path, READ_STREAM, failOnDataLoss="false"), 1)
    assert indices(lenient_stream, lenient_stream.partitions(start, end)) == list(range(21, 26))
    # A hole: the store purged messages that the feeder had not copied.
    directory.replace(directory.live[1:2], [])
    with pytest.raises(PySparkException, match="messages 31 to 40"):
        load(spark, f"{tmp_path}#in").count()
    assert load(spark, f"{tmp_path}#in", failOnDataLoss="false").count() == 20
    assert load(spark, f"{tmp_path}#in", startingPosition="41").count() == 10


def test_offsets_beyond_the_end_and_of_another_queue_are_refused(tmp_path: Path) -> None:
    queue_of(tmp_path / "a", ints(0, 10))
    queue_of(tmp_path / "b", ints(0, 5))
    stream = QueueStream(ROW, options(tmp_path / "a", READ_STREAM), 1)
    start = stream.initialOffset()
    end = stream.latestOffset(start, stream.getDefaultReadLimit())
    other = QueueStream(ROW, options(tmp_path / "b", READ_STREAM), 1)
    with pytest.raises(Diverged, match="belongs to another source"):
        other.partitions(start, end)
    with pytest.raises(Diverged, match="ends before 6, and messages up to 10 were planned"):
        other.partitions(start | {"cues": other.pinned.identity.hex()}, end | {"cues": other.pinned.identity.hex()})


# --- refusals, and other places -----------------------------------------------------------------


def test_what_makes_no_sense_for_a_directory_is_refused_by_name(spark: SparkSession, tmp_path: Path) -> None:
    queue_of(tmp_path, ints(0, 1))
    for path in (f"{tmp_path}#in", "s3://bucket/queues#in"):
        with pytest.raises(InvalidArgument, match=r"resumeFrom='a#b' is for queues of a store"):
            ReadOptions.of({"path": path, "resumeFrom": "a#b"}, READ_STREAM)
        with pytest.raises(InvalidArgument, match=r"whose queues only graphs write.*cues.spark.Source"):
            WriteOptions.of_batch({"path": path})
        with pytest.raises(InvalidArgument, match="whose queues only graphs write"):
            WriteOptions.of_stream({"path": path, "id": "x", "checkpointLocation": "c"})
    with pytest.raises(InvalidArgument, match="A store is on a local disk"):
        ReadOptions.of({"path": f"{tmp_path}/s#q", "resumeFrom": "s3://bucket/out#b"}, READ_STREAM)
    with pytest.raises(PySparkException, match="whose queues only graphs write"):
        spark.range(1).write.format("cues").mode("append").save(f"{tmp_path}#in")
    with pytest.raises(PySparkException, match="There is no store at"):
        load(spark, f"{tmp_path / 'in'}#in").count()
    assert len(list((tmp_path / "in").rglob("*.parquet"))) == 1


def test_a_store_in_the_directory_is_a_store(spark: SparkSession, tmp_path: Path) -> None:
    """Somebody keeps the graph's store beside the queues."""
    queue_of(tmp_path, ints(0, 3))
    fill(tmp_path, "in", [{"n": 7}])
    assert [row.n for row in load(spark, f"{tmp_path}#in", fields="n long").collect()] == [7]


IN_A_STORE = """
import sys
import cues.spark

url, checkpoint = sys.argv[1:]
with cues.spark.session("local[2]") as spark:
    table = spark.read.format("cues").options(fields="n bigint", startingPosition=19, partitions=2).load(f"{url}/#in")
    print([row.n for row in table.where("n < 25").collect()])
    stream = spark.readStream.format("cues").option("startingPosition", 21).load(f"{url}#in").select("index")
    query = stream.writeStream.format("memory").queryName("found").option("checkpointLocation", checkpoint)
    query.trigger(availableNow=True).start().awaitTermination()
    print([row["index"] for row in spark.table("found").collect()])
"""


def test_a_directory_in_an_object_store(spark: SparkSession, object_store: str, tmp_path: Path) -> None:
    """The variables with the credentials are those of the process that starts Spark."""
    directory = queue_of(object_store, *(ints(n * 10, n * 10 + 10) for n in range(3)))
    directory.files.delete(f"in/{directory.live[0].name}")
    when = (DAY + timedelta(hours=30)).isoformat()
    assert indices(QueueReader(ROW, options(object_store, startingPosition=when, partitions="2"), 1)) == [
        *range(21, 31)
    ]
    found = Child(IN_A_STORE, object_store, tmp_path / "checkpoint").end(300)
    assert found.splitlines()[-2:] == [str([*range(18, 25)]), str([*range(21, 31)])]


CLIENT = """
import json, sys
import cues.spark

url, folder = sys.argv[1:]
with cues.spark.session(url) as spark:
    table = spark.read.format("cues").options(fields="n bigint", startingPosition=11).load(f"{folder}#in")
    facts = {"sum": table.groupBy().sum("n").first()[0]}
    stream = spark.readStream.format("cues").option("startingPosition", 11).load(f"{folder}#in")
    query = stream.writeStream.format("cues").option("id", "copy").option("checkpointLocation", f"{folder}/checkpoint")
    query.trigger(availableNow=True).start(f"{folder}/store#copy").awaitTermination()
print(json.dumps(facts))
"""


def test_through_spark_connect(server: str, tmp_path: Path) -> None:  # noqa: F811
    """A table, of which one file must not be opened, and a stream."""
    directory = queue_of(tmp_path, ints(0, 10), ints(10, 20))
    os.unlink(tmp_path / "in" / directory.live[0].name)
    child = Child(CLIENT, server, tmp_path, JAVA_HOME="/nowhere")
    assert json.loads(child.end(180)) == {"sum": sum(range(10, 20))}
    with cues.open(tmp_path / "store", readonly=True) as opened:
        assert [message["n"] for message in opened.queue("copy").tailer()] == list(range(10, 20))
