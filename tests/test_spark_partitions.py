"""A queue with several partitions as one table and one stream: merged, cut, followed as it grows, exactly once."""

from __future__ import annotations

import random
import shutil
from collections import defaultdict
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import seeds

import cues
from cues.base import clock
from cues.errors import Diverged, InvalidArgument, MessagesPurged, QueueOptionsError
from cues.forwarding import external_writers
from cues.queues.base import views_of
from cues.queues.partitioners import partition_for

pytest.importorskip("pyspark", reason="pyspark is not installed (pip install 'cues-streams[test]')")

from pyspark.errors import PySparkException
from pyspark.sql import types as T
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows

from cues.spark.checkpoint import Offset
from cues.spark.datasource import CuesSource
from cues.spark.options import READ, READ_STREAM, ReadOptions, WriteOptions
from cues.spark.position import Indices
from cues.spark.reading import QueueReader, ReadSlice, row_of
from cues.spark.slices import cut, edges
from cues.spark.streams import QueueStream, StreamWriter

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.timeout(600)

Message = dict[str, Any]
SCHEMA = T.StructType([*row_of(True).fields, T.StructField("n", T.LongType())])


@pytest.fixture
def at(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The time of the next append, in ns; tests move it."""
    now = [1_000_000_000]
    monkeypatch.setattr(clock, "now_ns", lambda: now[0])
    return now


def fill(store: Path, start: int, stop: int, queue: str = "in", partitions: int = 3) -> None:
    """Append messages by key, in several appends."""
    with cues.open(store, durability="process") as opened:
        handle = (
            opened.queue(queue) if queue in opened.queues() else opened.queue(queue, partitions=partitions, key="n")
        )
        appender = handle.appender()
        for low in range(start, stop, 40):
            appender.write_many([{"n": n} for n in range(low, min(low + 40, stop))])


def merged(store: Path, queue: str = "in") -> list[int]:
    """The messages of a queue, as a tailer of all of it reads them."""
    with cues.open(store, readonly=True) as opened:
        return [message["n"] for message in opened.queue(queue).tailer()]


def options(store: Path, known: tuple[str, ...] = READ, queue: str = "in", **said: Any) -> ReadOptions:
    return ReadOptions.of({"path": f"{store}#{queue}", **{k: str(v) for k, v in said.items()}}, known)


def rows(found: Any, slices: list[Any]) -> list[Message]:
    return [row for slice in slices for batch in found.read(slice) for row in batch.to_pylist()]


# --- the sequence -------------------------------------------------------------------------------


def random_queue(path: Path, rng: random.Random, at: list[int]) -> None:
    """Partitions of very different length, appends at one time, long ones, some without anything, some purged."""
    with cues.open(path, durability="process") as store:
        partitions = rng.choice([1, 2, 3, 8])
        queue = store.queue("in", partitions=partitions, key="n")
        used = rng.sample(range(partitions), rng.randint(1, partitions))
        for _ in range(rng.randint(1, 40)):
            at[0] += rng.choice([0, 0, 1, 1000, 10**9, 10**13])
            count = rng.choice([1, 2, 30, 400])
            queue.partition(rng.choice(used)).appender().write_many([{"n": n} for n in range(count)])
        for view in views_of(queue):
            if rng.random() < 0.3:
                view.purge(before=rng.randint(1, view.core.row().next))


def test_cuts_are_places_in_the_merged_order(tmp_path: Path, at: list[int]) -> None:
    """For many random queues: read slice by slice, however it is cut, it is what a tailer of the whole reads."""
    seed = seeds.new()
    rng = random.Random(seed)
    for round in range(15):
        path = tmp_path / str(round)
        random_queue(path, rng, at)
        with cues.open(path, readonly=True) as store:
            queue = store.queue("in")
            tailer = queue.tailer(meta=False)
            expected = [(tailer.envelope.partition, tailer.last_read_index) for _ in tailer]  # type: ignore[union-attr]
            logs = [view.core.log for view in views_of(queue)]
            start, end = tuple(r.first for r in queue.core.rows()), tuple(r.next for r in queue.core.rows())
            with store.core.view() as txn:
                for _ in range(8):
                    count = rng.randint(0, len(expected) + 2)
                    behind = dict.fromkeys(range(len(logs)), 0)
                    for partition, _index in expected[:count]:
                        behind[partition] += 1
                    wanted = tuple(a + behind[number] for number, a in enumerate(start))
                    assert cut(txn, logs, start, end, count) == wanted, (round, count)
                slices = rng.randint(1, 9)
                meet = edges(txn, logs, start, end, slices)
        sizes = [sum(b) - sum(a) for a, b in pairwise(meet)]
        assert max(sizes) - min(sizes) <= 1
        assert sum(sizes) == len(expected)
        spread = len(logs) > 1
        reader = QueueReader(row_of(spread), options(path), 1)
        found = rows(reader, [ReadSlice(a, b) for a, b in pairwise(meet)])
        assert [(row.get("partition", 0), row["index"]) for row in found] == expected


def test_a_table_has_the_partition_beside_the_index_only_where_there_are_several(tmp_path: Path) -> None:
    fill(tmp_path / "s", 0, 100)
    for queue, several in (("in", True), ("in/1", False)):
        schema = CuesSource({"path": f"{tmp_path / 's'}#{queue}", "fields": "n long"}).schema()
        assert schema.split(", ")[:2] == ["`index` bigint", "`partition` int" if several else "`time` timestamp_ltz"]
    with pytest.raises(InvalidArgument, match=r"'partition' is declared string; in a row .* it is int.*rowColumns"):
        QueueReader(T.StructType([T.StructField("partition", T.StringType())]), options(tmp_path / "s"), 1)
    # Of one partition it is a field of the message, as ever.
    QueueReader(T.StructType([T.StructField("partition", T.StringType())]), options(tmp_path / "s", queue="in/1"), 1)


def test_a_time_is_a_place_on_every_partition_and_an_index_on_none(tmp_path: Path, at: list[int]) -> None:
    for day in range(5):
        at[0] = clock.to_ns(datetime(2026, 1, 1 + day, tzinfo=UTC))
        fill(tmp_path / "s", day * 100, day * 100 + 100)
    when = datetime(2026, 1, 3, tzinfo=UTC)
    said = {"startingPosition": when.isoformat(), "endingPosition": (when + timedelta(days=1)).isoformat()}
    reader = QueueReader(SCHEMA, options(tmp_path / "s", **said), 1)
    assert [row["n"] for row in rows(reader, reader.partitions())] == merged(tmp_path / "s")[200:300]
    for name in ("startingPosition", "endingPosition"):
        with pytest.raises(InvalidArgument, match=rf"{name}=7: each of the 3 partitions .*earliest, latest or a time"):
            QueueReader(SCHEMA, options(tmp_path / "s", **{name: 7}), 1)
    assert len(QueueReader(row_of(False), options(tmp_path / "s", queue="in/1", startingPosition=7), 1).start) == 1


def test_what_was_purged_on_one_partition_is_an_error_that_names_it_or_passed_over(tmp_path: Path) -> None:
    fill(tmp_path / "s", 0, 200)
    everything = QueueReader(SCHEMA, options(tmp_path / "s", partitions=2), 1)
    lenient = QueueReader(SCHEMA, options(tmp_path / "s", failOnDataLoss="false"), 1)
    with cues.open(tmp_path / "s") as store:
        store.queue("in/2").purge(before=11)
    with pytest.raises(MessagesPurged, match=r"messages 1 to 10 of .*#in, partition 2, were purged"):
        rows(everything, everything.partitions())
    assert [row["n"] for row in rows(lenient, lenient.partitions())] == merged(tmp_path / "s")


# --- streams, without Spark ---------------------------------------------------------------------


def follow(stream: QueueStream, offset: Message, limit: int | None = None) -> tuple[Message, list[Message]]:
    """One batch: the offset after it, and its rows."""
    end = stream.latestOffset(offset, ReadAllAvailable() if limit is None else ReadMaxRows(limit))
    return end, rows(stream, stream.partitions(offset, end)) if end != offset else []


def test_batches_of_a_stream_are_stretches_of_the_merged_order(tmp_path: Path) -> None:
    fill(tmp_path / "s", 0, 500)
    stream = QueueStream(SCHEMA, options(tmp_path / "s", READ_STREAM), 2)
    offset, found, sizes = stream.initialOffset(), [], []
    while True:
        after, batch = follow(stream, offset, 70)
        if after == offset:
            break
        offset = after
        sizes.append(len(batch))
        found += [row["n"] for row in batch]
    assert sizes == [70] * 7 + [10]
    assert found == merged(tmp_path / "s")


def test_a_queue_that_grows_is_followed_from_the_start_of_its_new_partitions(tmp_path: Path) -> None:
    """From one partition to three to five; offsets that were written before continue."""
    fill(tmp_path / "s", 0, 100, partitions=1)
    stream = QueueStream(T.StructType([SCHEMA["n"]]), options(tmp_path / "s", READ_STREAM), 2)
    offset, batch = follow(stream, stream.initialOffset())
    assert (offset["from"], offset["to"]) == (1, 101)  # as it was written before there were partitions
    found = [row["n"] for row in batch]
    for stop, partitions in ((200, 3), (300, 5)):
        with cues.open(tmp_path / "s") as store:
            store.queue("in", key="n").grow(partitions)
        assert follow(stream, offset) == (offset, [])
        fill(tmp_path / "s", stop - 100, stop)
        stale = offset
        offset, batch = follow(stream, offset)
        assert len(offset["to"]) == partitions
        found += [row["n"] for row in batch]
        again = QueueStream(SCHEMA, options(tmp_path / "s", READ_STREAM), 2)  # it has the column now
        replayed = rows(again, again.partitions(stale, offset))
        assert [row["n"] for row in replayed] == [row["n"] for row in batch]
        assert {row["partition"] for row in replayed} == set(range(partitions))
    assert sorted(found) == list(range(300))


def test_a_stream_of_all_partitions_is_not_taken_for_one_of_a_partition(tmp_path: Path) -> None:
    fill(tmp_path / "s", 0, 100)
    whole = QueueStream(SCHEMA, options(tmp_path / "s", READ_STREAM), 2)
    one = QueueStream(row_of(False), options(tmp_path / "s", READ_STREAM, queue="in/1"), 2)
    first = QueueStream(row_of(False), options(tmp_path / "s", READ_STREAM, queue="in/0"), 2)
    offset, _ = follow(whole, whole.initialOffset())
    with pytest.raises(Diverged, match="belongs to another source"):
        one.latestOffset(offset, ReadAllAvailable())
    with pytest.raises(Diverged, match=r"checkpoint has offsets of 3 partitions of .*in/0', which has 1"):
        first.latestOffset(offset, ReadAllAvailable())
    with pytest.raises(Diverged, match="belongs to another source"):
        follow(whole, follow(one, one.initialOffset())[0])


def committed(store: Path, identity: bytes, place: Indices) -> None:
    with cues.open(store, durability="process") as opened:
        opened.queue("out")
        position = ["queues", [[identity, list(place)]], b"12345678"]
        opened.core.commit(
            lambda txn: external_writers.put(txn, "copy", external_writers.SourceRow("out", 1, position))
        )


def test_a_batch_never_straddles_the_place_of_the_writer_on_any_partition(tmp_path: Path) -> None:
    """Behind an old checkpoint: first what is written already, in batches of their own, then what is not."""
    fill(tmp_path / "s", 0, 300)
    said = options(tmp_path / "s", READ_STREAM, resumeFrom=f"{tmp_path / 'o'}#copy")
    stream = QueueStream(SCHEMA, said, 2)
    stale = stream.initialOffset()  # the writer has written nothing yet
    with cues.open(tmp_path / "s", readonly=True) as store:
        end = tuple(row.next for row in store.queue("in").core.rows())
    place = (end[0], 40, 1)
    committed(tmp_path / "o", stream.pinned.identity, place)
    assert Offset.of(stream.initialOffset()) == Offset(stream.pinned.identity, place, place)
    offset, reached = stale, []
    while True:
        after, _ = follow(stream, offset, 50)
        if after == offset:
            break
        offset = after
        reached.append(tuple(offset["to"]))
    at = reached.index(place)
    assert all(a <= b for before in reached[:at] for a, b in zip(before, place))
    assert at > 0
    assert reached[-1] == end


# --- through Spark ------------------------------------------------------------------------------


def test_sql_over_all_partitions_and_a_copy_in_the_merged_order(spark: SparkSession, tmp_path: Path) -> None:
    fill(tmp_path / "s", 0, 1000)
    table = spark.read.format("cues").options(fields="n long", partitions=4).load(f"{tmp_path / 's'}#in")
    assert table.columns == ["index", "partition", "time", "hash", "value", "n"]
    assert table.rdd.getNumPartitions() == 4
    found = table.select("partition", "index", "n").collect()
    assert [row.n for row in found] == merged(tmp_path / "s")
    assert all(row.partition == partition_for(cues.codec.pack(row.n), 3) for row in found)
    # Written to a queue of one partition it is the merged queue; to one with partitions, the same by its own key.
    table.select("value").write.format("cues").mode("append").save(f"{tmp_path / 'o'}#flat")
    assert merged(tmp_path / "o", "flat") == merged(tmp_path / "s")
    with cues.open(tmp_path / "o") as store:
        store.queue("wide", partitions=5, key="n")
    table.select("n").write.format("cues").mode("append").save(f"{tmp_path / 'o'}#wide")
    table.select("value").write.format("cues").mode("append").save(f"{tmp_path / 'o'}#wide")
    with cues.open(tmp_path / "o", readonly=True) as store:
        for view in views_of(store.queue("wide")):
            here = [
                n for n in merged(tmp_path / "s") if partition_for(cues.codec.pack(n), 5) == view.core.log.partition
            ]
            assert [m["n"] for m in view.tailer()] == here * 2


def test_rows_that_have_no_partition_are_refused_and_nothing_is_written(spark: SparkSession, tmp_path: Path) -> None:
    with cues.open(tmp_path / "o", durability="process") as store:
        store.queue("wide", partitions=3, key="n")
        store.queue("turns", partitions=3)
        store.queue("code", partitions=3, key=len)
    table = spark.range(100, numPartitions=2).selectExpr("if(id = 60, null, id) as n", "id")
    for queue, error in (
        ("wide", "has no 'n', by which its partition is chosen"),
        ("code", "key=builtins:len, a funct"),
    ):
        with pytest.raises(PySparkException, match=error):
            table.write.format("cues").mode("append").save(f"{tmp_path / 'o'}#{queue}")
    table.write.format("cues").mode("append").save(f"{tmp_path / 'o'}#turns")
    with cues.open(tmp_path / "o", readonly=True) as store:
        assert [len(store.queue(queue)) for queue in ("wide", "code", "turns")] == [0, 0, 100]


def failing() -> type[CuesSource]:
    """The format, but that what a stream commits in the store Spark is not told."""

    class FailsBehindItsCommit(StreamWriter):
        def commit(self, messages: Any, batchId: int) -> None:
            super().commit(messages, batchId)
            raise RuntimeError("committed, and nobody knows")

    class Failing(CuesSource):
        @classmethod
        def name(cls) -> str:
            return "cues_failing"

        def streamWriter(self, schema: T.StructType, overwrite: bool) -> StreamWriter:
            return FailsBehindItsCommit(schema, WriteOptions.of_stream(self.options), overwrite)

    return Failing  # made in a function, so that it travels by value


def copy(
    spark: SparkSession, root: Path, size: int, form: str = "cues", delivery: str = "exactly-once", **reader: Any
) -> None:
    source = spark.readStream.format("cues").options(maxMessagesPerTrigger=size, **reader).load(f"{root / 's'}#in")
    settings = {"id": "copy", "delivery": delivery, "checkpointLocation": str(root / "checkpoint")}
    sink = source.select("value").writeStream.format(form).options(**settings).trigger(availableNow=True)
    query = sink.start(f"{root / 'o'}#out")
    assert query.awaitTermination(300)


def judge(root: Path, count: int) -> None:
    """Every message once, and each key's partition in the order of the source's."""
    with cues.open(root / "o") as store:
        assert store.check() == []
        found = [message["n"] for view in views_of(store.queue("out")) for message in view.tailer()]
    assert sorted(found) == list(range(count))
    series: dict[tuple[int, int], list[int]] = defaultdict(list)
    for n in found:
        key = cues.codec.pack(n)
        series[partition_for(key, 3), partition_for(key, 2)].append(n)
    assert all(one == sorted(one) for one in series.values())


def test_exactly_once_from_partitions_to_partitions(spark: SparkSession, tmp_path: Path) -> None:
    """A commit that Spark does not know of; the source grows; the checkpoint is old, and then it is gone."""
    spark.dataSource.register(failing())
    fill(tmp_path / "s", 0, 600)
    with cues.open(tmp_path / "o", durability="process") as store:
        store.queue("out", partitions=2, key="n")
    with pytest.raises(PySparkException, match="committed, and nobody knows"):
        copy(spark, tmp_path, 400, "cues_failing")
    shutil.copytree(tmp_path / "checkpoint", tmp_path / "stale")
    copy(spark, tmp_path, 350)
    judge(tmp_path, 600)

    with cues.open(tmp_path / "s") as store:
        store.queue("in").grow(4)
        assert store.queue("in").partitions == 4
    with cues.open(tmp_path / "s", durability="process") as store:
        appender = store.queue("in").appender()
        appender.write_many([{"n": n} for n in range(600, 700)])
    resume = {"resumeFrom": f"{tmp_path / 'o'}#copy"}
    shutil.rmtree(tmp_path / "checkpoint")
    shutil.copytree(tmp_path / "stale", tmp_path / "checkpoint")
    copy(spark, tmp_path, 300, **resume)
    with cues.open(tmp_path / "o", readonly=True) as store:
        assert store.check() == []
        assert sorted(m["n"] for m in store.queue("out").tailer()) == list(range(700))
        row = external_writers.rows(store)["copy"]
        assert row.next == [view.core.row().next for view in views_of(store.queue("out"))]
        assert len(row.position[1][0][1]) == 4

    shutil.rmtree(tmp_path / "checkpoint")
    with pytest.raises(PySparkException, match=r"does not follow what the writer 'copy' has written.*resumeFrom"):
        fill(tmp_path / "s", 700, 710)
        copy(spark, tmp_path, 100_000)
    shutil.rmtree(tmp_path / "checkpoint")
    copy(spark, tmp_path, 100_000, **resume)
    with cues.open(tmp_path / "o", readonly=True) as store:
        assert sorted(m["n"] for m in store.queue("out").tailer()) == list(range(710))


def test_rows_that_were_placed_on_fewer_partitions_than_there_are_by_now_are_not_written(tmp_path: Path) -> None:
    with cues.open(tmp_path / "o", durability="process") as store:
        store.queue("out", partitions=2, key="n")
    said = {"path": f"{tmp_path / 'o'}#out", "delivery": "at-least-once"}
    writer = StreamWriter(T.StructType([SCHEMA["n"]]), WriteOptions.of_stream(said), False)
    with cues.open(tmp_path / "o") as store:
        store.queue("out").grow(3)
    with pytest.raises(QueueOptionsError, match="has 3 partitions by now, and the rows were placed on 2; nothing was"):
        writer.commit([], 0)


def test_control_a_writer_without_a_position_writes_twice(spark: SparkSession, tmp_path: Path) -> None:
    """The same story without an id: messages whose commit Spark does not know are there twice."""
    spark.dataSource.register(failing())
    fill(tmp_path / "s", 0, 300)
    with pytest.raises(PySparkException, match="committed, and nobody knows"):
        copy(spark, tmp_path, 400, "cues_failing", "at-least-once")
    copy(spark, tmp_path, 400, delivery="at-least-once")
    assert sorted(merged(tmp_path / "o", "out")) == sorted([*range(300)] * 2)
