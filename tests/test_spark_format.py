"""The format cues through Spark: batch and stream, in and out, over queues that move meanwhile."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from children import Child

import cues
from cues import codec
from cues.errors import InvalidArgument
from cues.forwarding import external_writers
from cues.storage import locks

pytest.importorskip("pyspark", reason="pyspark is not installed (pip install 'cues-streams[test]')")

from pyspark.errors import AnalysisException, PySparkException

from cues.spark import staging
from cues.spark.failures import in_short
from cues.spark.options import READ_STREAM, ReadOptions
from cues.txn import Publisher

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming import StreamingQuery

pytestmark = pytest.mark.timeout(600)


def fill(store: Path, queue: str, messages: list[dict[str, Any]]) -> None:
    with cues.open(store, durability="process") as opened:
        opened.queue(queue).appender().write_many(messages)


def contents(store: Path, queue: str) -> list[dict[str, Any]]:
    with cues.open(store, readonly=True) as opened:
        return list(opened.queue(queue).tailer())


def load(spark: SparkSession, path: str, **options: Any) -> DataFrame:
    return spark.read.format("cues").options(**options).load(path)


def test_errors_begin_with_their_message(spark: SparkSession, tmp_path: Path) -> None:
    """Without a Python traceback: of plans, of tasks and of streams. A user's function still shows its own."""
    fill(tmp_path, "in", [{"n": 1}])

    def fails(rows: Any) -> Any:
        raise ValueError("mine")

    def stream() -> None:
        read = spark.readStream.format("cues").option("startingPosition", "77").load(f"{tmp_path}#in")
        query = read.writeStream.format("noop").option("checkpointLocation", str(tmp_path / "checkpoint")).start()
        query.processAllAvailable()

    table = load(spark, f"{tmp_path}#in", fields="n string", mode="strict")
    for action, text in [
        (lambda: load(spark, f"{tmp_path}#inn"), "has no queue 'inn'"),
        (lambda: load(spark, f"{tmp_path}#in", startingPosition="77").count(), "ends before 2"),
        (lambda: load(spark, f"{tmp_path}#in", misspelt=1).count(), "has no option 'misspelt'"),
        (table.collect, "Message 1, field n: found int"),
        (stream, "ends before 2"),
        (lambda: table.write.format("cues").mode("overwrite").save(f"{tmp_path}#in"), "never overwritten"),
    ]:
        with pytest.raises(PySparkException, match=rf"cues\.errors\.\w+: .*{text}.* Try: ") as refused:
            action()
        assert "Traceback" not in str(refused.value).partition("JVM stacktrace")[0]
        assert in_short(refused.value).startswith("cues.errors.")
    with pytest.raises(PySparkException, match=r"Traceback(.|\n)*ValueError: mine"):
        load(spark, f"{tmp_path}#in").mapInArrow(fails, "n long").collect()


def finish(query: StreamingQuery) -> list[tuple[int, int]]:
    """Wait for an availableNow query; batch numbers with their input rows."""
    assert query.awaitTermination(300)
    return [(progress["batchId"], progress["numInputRows"]) for progress in query.recentProgress]


# --- batch --------------------------------------------------------------------------------------


@pytest.mark.compiled
def test_sql_over_a_queue(spark: SparkSession, tmp_path: Path) -> None:
    """Declared columns, of flat and nested types, by fields and by schema; partitions; a filter by index."""
    written = [
        {
            "origin": ("JFK", "LGA")[n % 2],
            "delay": n / 2,
            "at": datetime(2026, 1, 1, n % 24, tzinfo=UTC),
            "tags": [n],
            "bad": n,
        }
        for n in range(1000)
    ]
    fill(tmp_path / "s", "flights", written)
    path = f"{tmp_path / 's'}#flights"
    fields = "origin string, delay double, at timestamp, tags array<int>, bad string"
    table = load(spark, path, fields=fields, partitions=3)
    assert table.columns == ["index", "time", "hash", "value", "origin", "delay", "at", "tags", "bad"]
    assert table.rdd.getNumPartitions() == 3
    table.createOrReplaceTempView("flights")
    found = spark.sql(
        "select origin, sum(delay) d, max(hour(at)) h, count(bad) b, sum(tags[0]) t from flights"
        " where index > 500 group by origin order by origin"
    ).collect()
    expected = [
        (o, sum(m["delay"] for m in part), max(m["at"].hour for m in part), 0, sum(m["tags"][0] for m in part))
        for o in ("JFK", "LGA")
        if (part := [m for m in written[500:] if m["origin"] == o])
    ]
    assert [tuple(row) for row in found] == expected
    narrow = spark.read.format("cues").schema("delay double, index bigint").load(path)
    assert [tuple(row) for row in narrow.orderBy("index").collect()] == [(n / 2, n + 1) for n in range(1000)]
    with pytest.raises(PySparkException, match=r"Message 1, field bad: found int \(0\), expected a str"):
        load(spark, path, fields=fields, mode="strict").collect()


def test_a_queue_that_is_not_there_is_named_with_those_that_are(spark: SparkSession, tmp_path: Path) -> None:
    fill(tmp_path / "s", "flights", [{"x": 1}])
    with pytest.raises(AnalysisException, match=r"has no queue 'fights'; it has flights"):
        load(spark, f"{tmp_path / 's'}#fights").count()
    with pytest.raises(AnalysisException, match="There is no store at"):
        load(spark, f"{tmp_path / 'nothing'}#fights").count()
    with pytest.raises(AnalysisException, match="no option 'partition'"):
        load(spark, f"{tmp_path / 's'}#flights", partition=3).count()
    assert not (tmp_path / "nothing").exists()


def test_a_try_log_and_an_empty_queue_can_be_read(spark: SparkSession, tmp_path: Path) -> None:
    graph = cues.Graph("g", store=tmp_path / "s")
    graph.source("q")
    graph.add(cues.Stream(lambda m: m, "q", "out", id="copy"))
    with graph.start() as running:
        running.send("q", {"x": 1})
        assert running.wait_idle(timeout=30)
    tries = spark.read.format("cues").schema("`q/type` string").load(f"{tmp_path / 's'}#g.copy")
    assert [row[0] for row in tries.collect()] == ["q.type.try/snapshot", "q.type.try/attempt"]
    with cues.open(tmp_path / "s") as store:
        store.queue("empty")
    assert load(spark, f"{tmp_path / 's'}#empty").collect() == []


def test_one_partition_is_read_and_written_on_its_own(spark: SparkSession, tmp_path: Path) -> None:
    store = tmp_path / "s"
    with cues.open(store, durability="process") as opened:
        queue = opened.queue("q", partitions=3, key="n")
        queue.appender().write_many([{"n": n} for n in range(60)])
        lengths = [len(queue.partition(i)) for i in range(3)]
    with pytest.raises(Exception, match="has no partition 3"):
        load(spark, f"{store}#q/3").count()
    parts = [load(spark, f"{store}#q/{i}", fields="n int") for i in range(3)]
    assert [part.count() for part in parts] == lengths
    assert sorted(row.n for part in parts for row in part.select("n").collect()) == list(range(60))
    spark.createDataFrame([(7,)], "n int").write.format("cues").mode("append").save(f"{store}#q/2")
    assert contents(store, "q/2")[-1] == {"n": 7}
    assert len(contents(store, "q")) == 61


def test_columns_become_messages_with_their_types(spark: SparkSession, tmp_path: Path) -> None:
    table = spark.sql(
        "select 1 as i, 'é' as s, 1.5D as d, true as b, cast('x' as binary) as y, cast(1.50 as decimal(5,2)) as m,"
        " date'2026-01-31' as day, timestamp'2026-01-31 12:00:00' as at, timestamp_ntz'2026-01-31 12:00:00' as local,"
        " array(timestamp'2026-01-31 12:00:00', null) as list, map('k', named_struct('z', 1)) as map,"
        " named_struct('t', timestamp'2026-01-31 12:00:00', 'u', array(1)) as struct, cast(null as int) as nothing"
    )
    table.write.format("cues").mode("append").save(f"{tmp_path / 's'}#out")
    at = datetime(2026, 1, 31, 12, tzinfo=UTC)
    (found,) = contents(tmp_path / "s", "out")
    assert found == {
        "i": 1,
        "s": "é",
        "d": 1.5,
        "b": True,
        "y": b"x",
        "m": Decimal("1.50"),
        "day": date(2026, 1, 31),
        "at": at,
        "local": at.replace(tzinfo=None),
        "list": [at, None],
        "map": {"k": {"z": 1}},
        "struct": {"t": at, "u": [1]},
        "nothing": None,
    }
    assert found["at"].utcoffset() is not None
    assert found["local"].tzinfo is None


def test_values_go_from_queue_to_queue_untouched_and_in_order(spark: SparkSession, tmp_path: Path) -> None:
    """Much enough to be staged in files; large and reserved keys too; nothing is left beside the store."""
    written = [{"n": n, "who": (n, {n}), "text": "x" * (n % 700)} for n in range(20_000)]
    written[7]["q/type"] = "special"
    written[9]["text"] = "x" * 100_000
    fill(tmp_path / "s", "in", written)
    load(spark, f"{tmp_path / 's'}#in", partitions=4).write.format("cues").mode("append").save(f"{tmp_path / 'o'}#out")
    assert contents(tmp_path / "o", "out") == written
    assert list((tmp_path / "o" / "staged").iterdir()) == []


def test_a_write_that_fails_in_one_task_writes_nothing(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tmp_path / "s", "in", [{"n": n, "text": "x" * 500} for n in range(3000)])
    fill(tmp_path / "s", "out", [{"kept": True}])
    table = load(spark, f"{tmp_path / 's'}#in", partitions=2)
    broken = table.selectExpr("case when index = 2999 then cast('no msgpack' as binary) else value end as value")
    with pytest.raises(PySparkException, match="is not the msgpack of a message"):
        broken.write.format("cues").mode("append").save(f"{tmp_path / 's'}#out")
    assert contents(tmp_path / "s", "out") == [{"kept": True}]
    # The other task may end after the abort; what it staged goes when the workers' process is gone.
    monkeypatch.setattr(locks, "process_state", lambda pid: "gone")
    staging.sweep(str(tmp_path / "s"))
    assert list((tmp_path / "s" / "staged").glob("*")) == []


def test_a_task_that_fails_leaves_nothing_of_its_own(spark: SparkSession, tmp_path: Path) -> None:
    fill(tmp_path / "s", "in", [{"n": n, "text": "x" * 500} for n in range(3000)])
    table = load(spark, f"{tmp_path / 's'}#in", partitions=1)
    broken = table.selectExpr("case when index = 2999 then cast('no msgpack' as binary) else value end as value")
    with pytest.raises(PySparkException, match="is not the msgpack of a message"):
        broken.write.format("cues").mode("append").save(f"{tmp_path / 's'}#out")
    assert list((tmp_path / "s" / "staged").glob("*/*")) == []


def test_broken_values_that_make_up_whole_ones_together_are_not_messages() -> None:
    """Values are decoded many at once: half of a message, and the other half followed by the next one."""
    from cues.spark.writing import together

    whole = [codec.pack({"n": n}) for n in range(3)]
    assert together(b"\xdd\0\0\0\x03" + b"".join(whole), whole) == [{"n": n} for n in range(3)]
    broken = [whole[0][:2], whole[0][2:] + whole[1], whole[2]]
    assert together(b"\xdd\0\0\0\x03" + b"".join(broken), broken) is None
    no_dict = [codec.pack([1]), *whole[1:]]
    assert together(b"\xdd\0\0\0\x03" + b"".join(no_dict), no_dict) is None


@pytest.mark.parametrize(
    ("select", "options", "error"),
    [
        ("value; 1 as x", {}, "select\\('value'\\)"),
        ("1 as x", {"encode": "value"}, "needs a column 'value' of type binary"),
        ("cast(null as binary) as value", {}, "value is NULL"),
        ("cast('\\u0001' as binary) as value", {}, "msgpack of a int, not of a dict"),
        ("1 as `q/secret`", {}, "'q/secret' is reserved"),
        ("interval 1 month as x", {}, "no counterpart in a message"),
        ("1 as x; 2 as x", {}, "Two columns are called 'x'"),
        ("repeat('x', 2000) as x", {}, "the queue's limit is 1,000"),
    ],
)
def test_rows_that_are_not_messages_are_refused_with_the_reason(
    spark: SparkSession, tmp_path: Path, select: str, options: dict[str, str], error: str
) -> None:
    with cues.open(tmp_path / "s", durability="process") as store:
        store.queue("q", max_message_bytes=1000).appender().write({"x": 1})
    table = load(spark, f"{tmp_path / 's'}#q").selectExpr(*select.split("; "))
    with pytest.raises(PySparkException, match=error):
        table.write.format("cues").options(**options).mode("append").save(f"{tmp_path / 's'}#q")
    assert contents(tmp_path / "s", "q") == [{"x": 1}]


def test_a_queue_is_never_overwritten_and_a_try_log_never_written(spark: SparkSession, tmp_path: Path) -> None:
    table = spark.range(1)
    with pytest.raises(PySparkException, match=r"never overwritten"):
        table.write.format("cues").mode("overwrite").save(f"{tmp_path / 's'}#q")
    with pytest.raises(PySparkException, match="try log"):
        table.write.format("cues").mode("append").save(f"{tmp_path / 's'}#g.q")


def test_a_batch_write_with_a_position_is_written_once(spark: SparkSession, tmp_path: Path) -> None:
    def write(start: int, end: int) -> None:
        table = spark.range(start, end, numPartitions=2)
        options = {"id": "loader", "start": start, "end": end}
        table.write.format("cues").options(**options).mode("append").save(f"{tmp_path / 's'}#q")

    write(0, 100)
    write(0, 100)
    write(100, 150)
    write(50, 150)
    assert [m["id"] for m in contents(tmp_path / "s", "q")] == list(range(150))
    for gap in ((151, 160), (140, 160)):
        with pytest.raises(PySparkException, match="does not follow what the writer 'loader' has written"):
            write(*gap)
    with pytest.raises(PySparkException, match="writes to the queue 'q', not to 'other'"):
        options = {"id": "loader", "start": 150, "end": 160}
        spark.range(10).write.format("cues").options(**options).mode("append").save(f"{tmp_path / 's'}#other")
    assert len(contents(tmp_path / "s", "q")) == 150


def test_what_killed_writers_left_is_swept_and_what_living_ones_have_is_not(
    spark: SparkSession, tmp_path: Path
) -> None:
    from cues.spark.staging import StagingArea, this_boot

    fill(tmp_path / "s", "q", [{"x": 1}])
    mine = StagingArea(str(tmp_path / "s"), os.getpid()).folder
    left = [mine.parent / f"{this_boot()}-{2**22 + 7}-dead", mine.parent / f"{'0' * 16}-1-rebooted"]
    for folder in (mine, *left):
        folder.mkdir(parents=True)
        (folder / "0-x").write_bytes(b"half a page")
    spark.range(1).write.format("cues").mode("append").save(f"{tmp_path / 's'}#q")
    assert [folder.exists() for folder in (mine, *left)] == [True, False, False]


# --- streams ------------------------------------------------------------------------------------


Start = Callable[..., "StreamingQuery"]


@pytest.fixture
def copy(spark: SparkSession, tmp_path: Path) -> Start:
    """Start a stream from the queue in of s to the queue out of o; options of the reader, and of the writer as to_."""

    def start(now: bool = True, **options: Any) -> StreamingQuery:
        writer = {k.removeprefix("to_"): v for k, v in options.items() if k.startswith("to_")}
        reader = {k: v for k, v in options.items() if not k.startswith("to_")}
        source = spark.readStream.format("cues").options(**reader).load(f"{tmp_path / 's'}#in")
        settings = {"id": "copy", "checkpointLocation": str(tmp_path / "checkpoint"), **writer}
        sink = source.writeStream.format("cues").options(**settings)
        trigger = {"availableNow": True} if now else {"processingTime": "0 seconds"}
        return sink.trigger(**trigger).start(f"{tmp_path / 'o'}#out")

    return start


def test_available_now_takes_what_is_there_in_bounded_batches(copy: Start, tmp_path: Path) -> None:
    fill(tmp_path / "s", "in", [{"n": n} for n in range(1000)])
    assert finish(copy(maxMessagesPerTrigger=300)) == [(0, 300), (1, 300), (2, 300), (3, 100)]
    fill(tmp_path / "s", "in", [{"n": n} for n in range(1000, 1100)])
    assert finish(copy()) == [(4, 100)]
    assert contents(tmp_path / "o", "out") == [{"n": n} for n in range(1100)]
    with cues.open(tmp_path / "o", readonly=True) as store:
        row = external_writers.rows(store)["copy"]
    assert (row.queue, row.next, row.position[0], row.position[1][0][1]) == ("out", 1101, "queues", 1101)


def test_a_stream_follows_a_queue_while_its_graph_runs(copy: Start, spark: SparkSession, tmp_path: Path) -> None:
    """Embedded engine and Spark on one store at the same time; SQL sees more of it every time."""
    graph = cues.Graph("g", store=tmp_path / "s", durability="process")
    graph.source("raw")
    graph.add(cues.Stream(lambda m: {"n": m["n"]}, "raw", "in", id="copy"))
    done = threading.Event()
    with graph.start() as running:
        running.send("raw", {"n": 0})
        assert running.wait_idle(timeout=30)
        query = copy(now=False)

        def feed() -> None:
            for n in range(1, 3000):
                running.send("raw", {"n": n})
            done.set()

        feeder = threading.Thread(target=feed)
        feeder.start()
        seen = [load(spark, f"{tmp_path / 's'}#in").count() for _ in range(3)]
        assert done.wait(60)
        feeder.join()
        assert running.wait_idle(timeout=60)
        query.processAllAvailable()
        query.stop()
    assert seen == sorted(seen)
    assert contents(tmp_path / "o", "out") == [{"n": n} for n in range(3000)]


def test_latest_begins_after_the_existing_messages(copy: Start, tmp_path: Path) -> None:
    fill(tmp_path / "s", "in", [{"n": n} for n in range(10)])
    query = copy(now=False, startingPosition="latest")
    query.processAllAvailable()
    fill(tmp_path / "s", "in", [{"n": n} for n in range(10, 15)])
    query.processAllAvailable()
    query.stop()
    assert contents(tmp_path / "o", "out") == [{"n": n} for n in range(10, 15)]


def test_a_function_that_drops_everything_leaves_no_gap(spark: SparkSession, tmp_path: Path) -> None:
    """The position comes from Spark's record of the batch, not from the rows that are left of it."""
    fill(tmp_path / "s", "in", [{"n": n} for n in range(500)])
    source = spark.readStream.format("cues").option("maxMessagesPerTrigger", 100).load(f"{tmp_path / 's'}#in")
    for where in ("index % 100 > 50 and index > 200", "true"):
        name = str(len(where))
        sink = source.where(where).writeStream.format("cues").option("id", name)
        sink = sink.option("checkpointLocation", str(tmp_path / name)).trigger(availableNow=True)
        assert len(finish(sink.start(f"{tmp_path / 's'}#out{name}"))) == 5
    expected = [{"n": n} for n in range(500) if (n + 1) % 100 > 50 and n + 1 > 200]
    assert contents(tmp_path / "s", f"out{len('index % 100 > 50 and index > 200')}") == expected
    assert len(contents(tmp_path / "s", "out4")) == 500


def test_messages_that_were_purged_before_a_stream_read_them_stop_it_or_are_passed_over(
    copy: Start, tmp_path: Path
) -> None:
    fill(tmp_path / "s", "in", [{"n": n} for n in range(10)])
    finish(copy())
    fill(tmp_path / "s", "in", [{"n": n} for n in range(10, 100)])
    with cues.open(tmp_path / "s") as store:
        store.queue("in").purge(before=51)
    with pytest.raises(PySparkException, match=r"messages 11 to 50 of .* were purged"):
        finish(copy())
    assert contents(tmp_path / "o", "out") == [{"n": n} for n in range(10)]
    finish(copy(failOnDataLoss="false"))
    assert contents(tmp_path / "o", "out") == [{"n": n} for n in (*range(10), *range(50, 100))]


def test_a_queue_that_was_made_anew_is_not_read_from_the_old_position(copy: Start, tmp_path: Path) -> None:
    fill(tmp_path / "s", "in", [{"n": n} for n in range(10)])
    finish(copy())
    (tmp_path / "s").rename(tmp_path / "old")
    fill(tmp_path / "s", "in", [{"other": n} for n in range(20)])
    with pytest.raises(PySparkException, match="The checkpoint belongs to another source"):
        finish(copy())
    assert len(contents(tmp_path / "o", "out")) == 10


def test_a_store_that_was_replaced_after_a_checkpoint_is_refused_until_it_is_adopted(
    copy: Start, tmp_path: Path
) -> None:
    fill(tmp_path / "s", "in", [{"n": n} for n in range(10)])
    finish(copy())
    (tmp_path / "o").rename(tmp_path / "old")
    fill(tmp_path / "s", "in", [{"n": n} for n in range(10, 20)])
    with pytest.raises(PySparkException, match=r"past its first batch, and .* knows of no writer 'copy'"):
        finish(copy())
    finish(copy(to_adopt="true"))
    assert contents(tmp_path / "o", "out") == [{"n": n} for n in range(10, 20)]


def test_windows_that_close_without_new_messages_are_written(spark: SparkSession, tmp_path: Path) -> None:
    """The batch of a watermark has no new messages and has rows: its position is that of the batch before."""
    minutes = [datetime(2026, 1, 1, 0, m, tzinfo=UTC) for m in (0, 0, 1, 30)]
    fill(tmp_path / "s", "in", [{"at": at} for at in minutes])
    source = spark.readStream.format("cues").schema("at timestamp").load(f"{tmp_path / 's'}#in")
    table = source.withWatermark("at", "1 minute").groupBy("at").count()
    sink = table.writeStream.format("cues").option("id", "windows").outputMode("append")
    sink = sink.option("checkpointLocation", str(tmp_path / "c")).trigger(availableNow=True)
    assert [rows for _, rows in finish(sink.start(f"{tmp_path / 's'}#out"))] == [4, 0]
    found = sorted(contents(tmp_path / "s", "out"), key=lambda m: m["at"])
    assert found == [{"at": minutes[0], "count": 2}, {"at": minutes[2], "count": 1}]


def test_other_sources_are_exact_beside_their_checkpoint_only(spark: SparkSession, tmp_path: Path) -> None:
    """Files: an offset is a line of the checkpoint's own log, and means nothing without it."""
    (tmp_path / "files").mkdir()

    def run(checkpoint: str) -> None:
        source = spark.readStream.schema("n int").option("maxFilesPerTrigger", 1).json(str(tmp_path / "files"))
        sink = source.writeStream.format("cues").option("id", "files").trigger(availableNow=True)
        finish(sink.option("checkpointLocation", str(tmp_path / checkpoint)).start(f"{tmp_path / 's'}#out"))

    for n in range(3):
        (tmp_path / "files" / f"{n}.json").write_text(f'{{"n": {n}}}\n')
    run("first")
    (tmp_path / "files" / "3.json").write_text('{"n": 3}\n')
    run("first")
    assert sorted(m["n"] for m in contents(tmp_path / "s", "out")) == [0, 1, 2, 3]
    with pytest.raises(PySparkException, match="does not follow"):
        run("second")
    assert len(contents(tmp_path / "s", "out")) == 4


def test_two_queues_in_one_stream(spark: SparkSession, tmp_path: Path) -> None:
    for queue in ("a", "b"):
        fill(tmp_path / "s", queue, [{"from": queue, "n": n} for n in range(50)])
    for _ in range(2):
        sources = [
            spark.readStream.format("cues").option("maxMessagesPerTrigger", limit).load(f"{tmp_path / 's'}#{queue}")
            for queue, limit in (("a", 20), ("b", 50))
        ]
        sink = sources[0].union(sources[1]).writeStream.format("cues").option("id", "both")
        sink = sink.option("checkpointLocation", str(tmp_path / "c")).trigger(availableNow=True)
        finish(sink.start(f"{tmp_path / 's'}#out"))
        fill(tmp_path / "s", "b", [{"from": "b", "n": 50}])
    found = contents(tmp_path / "s", "out")
    assert [m["n"] for m in found if m["from"] == "a"] == list(range(50))
    assert [m["n"] for m in found if m["from"] == "b"] == list(range(51))


def test_a_writer_in_another_process_and_spark_write_side_by_side(spark: SparkSession, tmp_path: Path) -> None:
    fill(tmp_path / "s", "q", [{"n": -1}])
    code = (
        "import sys, cues\n"
        "with cues.open(sys.argv[1]) as store:\n"
        "    a = store.queue('q').appender(); print('ready')\n"
        "    for n in range(2000): a.write({'n': n})\n"
        "print('done')"
    )
    with Child(code, tmp_path / "s") as child:
        assert child.line() == "ready"
        for _ in range(3):
            spark.range(1000).selectExpr("id as spark").write.format("cues").mode("append").save(f"{tmp_path / 's'}#q")
        assert child.line() == "done"
        child.end()
    found = contents(tmp_path / "s", "q")
    assert [m["n"] for m in found if "n" in m] == list(range(-1, 2000))
    assert [m["spark"] for m in found if "spark" in m] == list(range(1000)) * 3


def test_a_session_of_the_users_is_used_and_never_stopped(spark: SparkSession) -> None:
    import cues.spark

    for given in (None, spark):
        with cues.spark.session("local[1]", spark=given) as found:
            assert found is spark
        assert spark.range(3).count() == 3
    counts: list[int] = []

    def elsewhere() -> None:
        with cues.spark.session("local[1]") as found:
            counts.append(found.range(4).count())

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert counts == [4]
    assert spark.range(3).count() == 3
    cues.spark.register(spark)
    cues.spark.register(spark)
    assert spark.conf.get("spark.sql.session.timeZone") == "UTC"


# --- committed messages -----------------------------------------------------------------------------


def test_committed_messages_are_read_once_by_a_query_that_restarts(spark: SparkSession, tmp_path: Path) -> None:
    """A pending transaction is before the position of the checkpoint; it commits later, and its messages are read."""
    path = f"{tmp_path / 's'}#orders"
    rows: list[tuple[int, int]] = []

    def take(frame: DataFrame, batch: int) -> None:
        rows.extend((row["index"], row["n"]) for row in frame.select("index", "n").collect())

    def run() -> list[tuple[int, int]]:
        rows.clear()
        stream = spark.readStream.format("cues").options(fields="n int", isolation="committed", partitions=2)
        query = stream.load(path).writeStream.foreachBatch(take).trigger(availableNow=True)
        finish(query.option("checkpointLocation", str(tmp_path / "checkpoint")).start())
        return sorted(rows)

    with cues.open(tmp_path / "s", durability="process") as store, Publisher() as slow, Publisher() as quick:
        orders = store.queue("orders")
        for n in range(3):
            slow.publish_uncommitted(lambda message: orders, {"n": n}).wait()
        for n in range(10, 13):
            quick.publish_uncommitted(lambda message: orders, {"n": n}).wait()
        assert run() == []
        quick.append_ack_intents(quick.build_ack_intents())
        assert run() == [(4, 10), (5, 11), (6, 12)]
        orders.appender().write({"n": 20})
        slow.append_ack_intents(slow.build_ack_intents())
        assert run() == [(1, 0), (2, 1), (3, 2), (8, 20)]
        assert run() == []
        table = load(spark, path, fields="n int", isolation="committed", partitions=1)
        assert [row["n"] for row in table.collect()] == [10, 11, 12, 20, 0, 1, 2]
        assert load(spark, path).count() == 7


@pytest.mark.fast
def test_the_format_refuses_what_committed_reading_cannot_do(tmp_path: Path) -> None:
    fill(tmp_path / "s", "q", [{"n": 1}])
    place = {"store": str(tmp_path / "s"), "queue": "q", "isolation": "committed"}
    assert ReadOptions.of(place, READ_STREAM).isolation == "committed"
    for wrong, what in (
        ({"resumeFrom": f"{tmp_path / 's'}#w"}, "resumeFrom"),
        ({"startingPosition": "3"}, "an index"),
        ({"isolation": "serial"}, "isolation='serial'"),
    ):
        with pytest.raises(InvalidArgument, match=what):
            ReadOptions.of({**place, **wrong}, READ_STREAM)
